// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/data_watch.h"

#include <ATen/core/VariableHooksInterface.h>
#include <xxhash.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "lockstep/base/own_process.h"

namespace lockstep {

struct DataWatch::Storage {
  using Checksum = std::optional<XXH64_hash_t>;

  Checksum compute() const {
    const auto alive = storage.lock();
    return alive ? Checksum(XXH3_64bits(alive->data(), alive->nbytes())) : std::nullopt;
  }

  std::size_t index;  // in watch()
  const c10::StorageImpl* key;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // weak: a gradient that was dropped gives its memory back
  Checksum checksum{};  // as it was when data() was first called. Guarded by the registry's mutex
};

namespace {

// What all DataWatches of the process watch, by storage. Ranks that are threads watch the same parameters, each with an
// entry of its own.
class Registry {
 public:
  using Entry = std::shared_ptr<DataWatch::Storage>;

  static std::mutex& mutex() {
    static auto* const instance = new std::mutex;
    return *instance;
  }

  void add(const Entry& entry) {
    const std::lock_guard lock(mutex());
    entries_.emplace(entry->key, entry);
    any_ = true;
  }

  void remove(const Entry& entry) {
    const std::lock_guard lock(mutex());
    const auto [begin, end] = entries_.equal_range(entry->key);
    for (auto it = begin; it != end; ++it)
      if (it->second == entry) {
        entries_.erase(it);
        break;
      }
    any_ = !entries_.empty();
  }

  void note(const at::TensorBase& tensor) {
    if (!any_ || !tensor.has_storage()) return;
    const std::lock_guard lock(mutex());
    const auto [begin, end] = entries_.equal_range(tensor.storage().unsafeGetStorageImpl());
    for (auto it = begin; it != end; ++it)
      if (!it->second->checksum) it->second->checksum = it->second->compute();
  }

  void accept(DataWatch::Storage& entry) {
    const std::lock_guard lock(mutex());
    entry.checksum.reset();
  }

  bool is_changed(const DataWatch::Storage& entry) {
    const std::lock_guard lock(mutex());
    if (!entry.checksum) return false;
    const DataWatch::Storage::Checksum now = entry.compute();
    return now && now != entry.checksum;
  }

 private:
  std::unordered_multimap<const c10::StorageImpl*, Entry> entries_;
  std::atomic<bool> any_ = false;
};

Registry& registry() {
  static auto* const instance = new Registry;  // tensors may be used after static objects are gone
  return *instance;
}

// Torch's own hooks, but for the two ways to get a tensor with a version counter of its own.
class Hooks final : public at::impl::VariableHooksInterface {
 public:
  explicit Hooks(const at::impl::VariableHooksInterface& torchs) : torchs_(torchs) {}

  at::TensorBase data(const at::TensorBase& tensor) const override { return variable_data(tensor); }
  at::TensorBase variable_data(const at::TensorBase& tensor) const override {
    registry().note(tensor);
    return torchs_.variable_data(tensor);
  }

  at::TensorBase tensor_data(const at::TensorBase& t) const override { return torchs_.tensor_data(t); }
  const std::shared_ptr<torch::autograd::Node>& grad_fn(const at::TensorBase& t) const override {
    return torchs_.grad_fn(t);
  }
  unsigned _register_hook(const at::TensorBase& t,
                          std::function<at::TensorBase(const at::TensorBase&)> hook) const override {
    return torchs_._register_hook(t, std::move(hook));
  }
  void remove_hook(const at::TensorBase& t, unsigned position) const override { torchs_.remove_hook(t, position); }
  bool is_view(const at::TensorBase& t) const override { return torchs_.is_view(t); }
  const at::TensorBase& base(const at::TensorBase& t) const override { return torchs_.base(t); }
  const std::string& name(const at::TensorBase& t) const override { return torchs_.name(t); }
  bool is_leaf(const at::TensorBase& t) const override { return torchs_.is_leaf(t); }
  std::int64_t output_nr(const at::TensorBase& t) const override { return torchs_.output_nr(t); }
  void set_data(const at::TensorBase& t, const at::TensorBase& data) const override { torchs_.set_data(t, data); }
  std::int64_t _version(const at::TensorBase& t) const override { return torchs_._version(t); }
  void retain_grad(const at::TensorBase& t) const override { torchs_.retain_grad(t); }
  bool retains_grad(const at::TensorBase& t) const override { return torchs_.retains_grad(t); }
  void _backward(const at::Tensor& t, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> retain_graph, bool create_graph) const override {
    torchs_._backward(t, inputs, gradient, retain_graph, create_graph);
  }
  void requires_grad_(const at::TensorBase& t, bool value) const override { torchs_.requires_grad_(t, value); }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    torchs_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const at::TensorBase& t) const override { return torchs_.grad_dtype(t); }
  void set_grad_dtype(const at::TensorBase& t, const std::optional<c10::ScalarType>& dtype) const override {
    torchs_.set_grad_dtype(t, dtype);
  }

 private:
  const at::impl::VariableHooksInterface& torchs_;
};

void install_hooks() {
  static auto* const installed = [] {
    auto* const hooks = new Hooks(*at::impl::GetVariableHooks());
    at::impl::SetVariableHooks(hooks);
    hold_during_fork<std::mutex, &Registry::mutex>();  // a forked child may call data()
    return hooks;
  }();
  static_cast<void>(installed);
}

}  // namespace

DataWatch::DataWatch() { install_hooks(); }
DataWatch::~DataWatch() { watch({}); }

void DataWatch::watch(const std::vector<torch::Tensor>& tensors) {
  for (const auto& storage : storages_) registry().remove(storage);
  storages_.clear();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || !tensors[i].has_storage() || tensors[i].numel() == 0) continue;
    const auto storage = tensors[i].storage().getWeakStorageImpl();
    storages_.push_back(std::make_shared<Storage>(i, tensors[i].storage().unsafeGetStorageImpl(), storage));
    registry().add(storages_.back());
  }
}

void DataWatch::accept() {
  for (const auto& storage : storages_) registry().accept(*storage);
}

std::optional<std::size_t> DataWatch::changed() const {
  for (const auto& storage : storages_)
    if (registry().is_changed(*storage)) return storage->index;
  return std::nullopt;
}

}  // namespace lockstep
