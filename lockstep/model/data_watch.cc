// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/data_watch.h"

#include <ATen/core/VariableHooksInterface.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "lockstep/base/process/own_process.h"
#include "lockstep/base/torch_version.h"

namespace lockstep {
namespace {

// The DataWatches of the process. Ranks that are threads watch the same parameters, each with a DataWatch of its own.
struct Registry {
  static std::mutex& mutex() {
    static auto* const instance = new std::mutex;
    return *instance;
  }

  std::vector<DataWatch*> all;         // guarded by the mutex, as is what each of them watches
  std::atomic<int> watching_some = 0;  // of these
};

Registry& registry() {
  static auto* const instance = new Registry;  // tensors may be used after static objects are gone
  return *instance;
}

void note_data_of(const at::TensorBase& tensor) {
  if (registry().watching_some == 0 || !tensor.has_storage()) return;
  const std::lock_guard lock(Registry::mutex());
  for (DataWatch* const watch : registry().all) watch->note(tensor.storage().unsafeGetStorageImpl());
}

// Torch's own hooks, but for the two ways to get a tensor with a version counter of its own.
class Hooks final : public at::impl::VariableHooksInterface {
 public:
  explicit Hooks(const at::impl::VariableHooksInterface& torchs) : torchs_(torchs) {}

  at::TensorBase data(const at::TensorBase& tensor) const override { return variable_data(tensor); }
  at::TensorBase variable_data(const at::TensorBase& tensor) const override {
    note_data_of(tensor);
    return torchs_.variable_data(tensor);
  }

  at::TensorBase tensor_data(const at::TensorBase& t) const override { return torchs_.tensor_data(t); }
  const NodePtr& grad_fn(const at::TensorBase& t) const override { return torchs_.grad_fn(t); }
  unsigned _register_hook(const at::TensorBase& t,
                          std::function<at::TensorBase(const at::TensorBase&)> hook) const override {
    return torchs_._register_hook(t, std::move(hook));
  }
  void remove_hook(const at::TensorBase& t, unsigned position) const override { torchs_.remove_hook(t, position); }
  bool is_view(const at::TensorBase& t) const override { return torchs_.is_view(t); }
  const at::TensorBase& base(const at::TensorBase& t) const override { return torchs_.base(t); }
  const std::string& name(const at::TensorBase& t) const override { return torchs_.name(t); }
  bool is_leaf(const at::TensorBase& t) const override { return torchs_.is_leaf(t); }
  int64_t output_nr(const at::TensorBase& t) const override { return torchs_.output_nr(t); }
  void set_data(const at::TensorBase& t, const at::TensorBase& data) const override { torchs_.set_data(t, data); }
  int64_t _version(const at::TensorBase& t) const override { return torchs_._version(t); }
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
    std::atomic_thread_fence(std::memory_order_release);  // torch stores the pointer, and other threads use it at once
    at::impl::SetVariableHooks(hooks);
    hold_during_fork<std::mutex, &Registry::mutex>();  // a forked child may call data()
    return hooks;
  }();
  static_cast<void>(installed);
}

}  // namespace

DataWatch::DataWatch() {
  install_hooks();
  const std::lock_guard lock(Registry::mutex());
  registry().all.push_back(this);
}

DataWatch::~DataWatch() {
  watch({});
  const std::lock_guard lock(Registry::mutex());
  std::erase(registry().all, this);
}

void DataWatch::watch(const std::vector<torch::Tensor>& tensors) {
  const std::lock_guard lock(Registry::mutex());
  const bool watched_some = !watched_.empty();
  watched_.clear();
  is_sorted_ = false;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].defined() && tensors[i].has_storage() && tensors[i].numel() > 0)
      watched_.push_back({tensors[i].storage().unsafeGetStorageImpl(), tensors[i].storage().getWeakStorageImpl(), i});
  registry().watching_some += !watched_.empty() - watched_some;
}

void DataWatch::accept() {
  const std::lock_guard lock(Registry::mutex());
  for (Watched& watched : watched_) watched.checksum.reset();
}

std::optional<size_t> DataWatch::changed() const {
  const std::lock_guard lock(Registry::mutex());
  std::optional<size_t> first;
  for (const Watched& watched : watched_) {
    if (!watched.checksum || (first && *first < watched.index)) continue;
    const auto now = checksum_of(watched);
    if (now && now != watched.checksum) first = watched.index;
  }
  return first;
}

void DataWatch::note(const c10::StorageImpl* storage) {
  if (!is_sorted_) std::ranges::sort(watched_, {}, &Watched::storage);
  is_sorted_ = true;
  for (Watched& watched : std::ranges::equal_range(watched_, storage, {}, &Watched::storage))
    if (!watched.checksum) watched.checksum = checksum_of(watched);
}

std::optional<uint64_t> DataWatch::checksum_of(const Watched& watched) {
  const auto alive = watched.weak.lock();
  return alive ? std::optional<uint64_t>(XXH3_64bits(alive->data(), alive->nbytes())) : std::nullopt;
}

}  // namespace lockstep
