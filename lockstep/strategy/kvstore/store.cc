// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/store.h"

#include <algorithm>
#include <span>

#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/world.h"

namespace lockstep {
namespace {

constexpr int64_t kWorthDividing = 1 << 16;  // elements: below it, waking the devices costs more
constexpr int64_t kChunksAtOnce = 4;

// Sums chunk by chunk: they stay in the first-level cache while all terms are added to them. Each chunk is written by one thread and its
// order of summation is fixed, so the bits do not depend on the number of threads.
template <class T>
void sum_chunks(T* into, std::span<const Term> terms, torch::ScalarType dtype, int64_t count,
                const ParallelFor& parallel_for) {
  const int64_t chunks = (count + kMaxChunk - 1) / kMaxChunk;
  parallel_for(0, chunks, kChunksAtOnce, [&](int64_t first, int64_t last) {
    for (int64_t begin = first * kMaxChunk; begin < std::min(last * kMaxChunk, count); begin += kMaxChunk)
      weighted_sum(terms, dtype, begin, std::min(kMaxChunk, count - begin), into + begin);
  });
}

}  // namespace

std::vector<Key> keys_of(const NamedTensors& values, const NamedTensors& buffers) {
  std::vector<Key> keys;
  for (const auto* const list : {&values, &buffers})
    for (const auto& [name, tensor] : *list)
      keys.push_back({.elements = tensor.numel(),
                      .rows = tensor.dim() > 0 && tensor.numel() > 0 ? tensor.size(0) : 1,
                      .dtype = tensor.scalar_type(),
                      .trained = list == &values});
  return keys;
}

void Store::init(const NamedTensors& values, const NamedTensors& buffers) {
  require(keys_.empty(), "init() of a store that has its keys", "give all keys at once");
  Tensors tensors;
  for (const auto* const list : {&values, &buffers})
    for (const auto& [name, tensor] : *list) {
      require(numbers_.emplace(name, names_.size()).second, concat("two values for the key ", name),
              "give each key once");
      names_.push_back(name);
      sizes_.push_back(tensor.sizes().vec());
      tensors.push_back(tensor.detach());
    }
  keys_ = keys_of(values, buffers);
  create(tensors);
}

size_t Store::number_of(const std::string& name) const {
  if (const auto found = numbers_.find(name); found != numbers_.end()) return found->second;
  throw UsageError({.what = concat("the store has no key ", name), .next = "give init() every key"});
}

// Calls call(keys, cut) for neighbouring keys at a time; cut() takes their part out of DeviceTensors. tensors: all that will be cut.
template <class Call>
void Store::for_each_range(const Names& names, std::initializer_list<const DeviceTensors*> tensors,
                           const Call& call) const {
  std::vector<size_t> numbers;  // all of them before the first call: an unknown name leaves nothing half done
  for (const std::string& name : names) numbers.push_back(number_of(name));
  for (const DeviceTensors* const each : tensors) require_fitting(names, *each);
  for (size_t first = 0, last = 0; first < names.size(); first = last) {
    const size_t key = numbers[first];
    for (last = first + 1; last < names.size() && numbers[last] == key + last - first;) ++last;
    call(KeyRange{key, key + last - first}, [first, last](const DeviceTensors& from) {
      DeviceTensors range;
      for (const auto& device : from) {
        const auto keys = std::span(device).subspan(first, last - first);
        range.emplace_back(keys.begin(), keys.end());
      }
      return range;
    });
  }
}

// Throws UsageError, DeviceError.
void Store::require_fitting(const Names& names, const DeviceTensors& tensors) const {
  const int most = devices_ != nullptr ? devices_->size() : to_int(tensors.size());
  const bool is_for_all = tensors.size() == 1 || std::ssize(tensors) == most;
  const auto has_all = [&](const auto& of_device) { return of_device.size() == names.size(); };
  if (tensors.empty() || !is_for_all || !std::ranges::all_of(tensors, has_all))
    throw UsageError({.what = concat("tensors for ", tensors.size(), " devices in a call of a store with ", most),
                      .next = "give each of the keys one tensor, or one for each device"});
  for (int device = 0; device < std::ssize(tensors); ++device)
    for (size_t i = 0; i < names.size(); ++i)
      if (const Tensor& tensor = tensors[device].at(i); tensor.defined())
        require_fitting(number_of(names[i]), tensor, device);
}

void Store::require_fitting(size_t key, const Tensor& tensor, int device) const {
  if (tensor.sizes() != sizes_[key] || tensor.scalar_type() != keys_[key].dtype)
    throw UsageError({.what = concat("a tensor of shape ", tensor.sizes(), " ", c10::toString(tensor.scalar_type()),
                                     " for the key ", names_[key], ", whose value has shape ",
                                     torch::IntArrayRef(sizes_[key]), " ", c10::toString(keys_[key].dtype)),
                      .next = "give tensors like the one that init() was given"});
  if (devices_ != nullptr && device < devices_->size())
    require_device(tensor, devices_->where(device), concat("the tensor of ", names_[key], " for the store"));
}

void Store::push(const Names& names, const DeviceTensors& values, const PushOptions& options) {
  for_each_range(names, {&values}, [&](KeyRange keys, const auto& cut) { push(keys, cut(values), options); });
}

void Store::pull(const Names& names, const DeviceTensors& into) {
  for_each_range(names, {&into}, [&](KeyRange keys, const auto& cut) { pull(keys, cut(into)); });
}

void Store::push_pull(const Names& names, const DeviceTensors& values, const DeviceTensors& into,
                      const PushOptions& options) {
  for_each_range(names, {&values, &into},
                 [&](KeyRange keys, const auto& cut) { push_pull(keys, cut(values), cut(into), options); });
}

void Store::push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                      const PushOptions& options) {
  push(keys, values, options);
  pull(keys, into);
}

Tensor Store::row_sparse_pull(const std::string& name, const Tensor& rows) {
  const size_t key = number_of(name);
  const int64_t all = keys_[key].rows;
  if (rows.scalar_type() != torch::kInt64 || rows.dim() != 1 || rows.lt(0).logical_or(rows.ge(all)).any().item<bool>())
    throw UsageError({.what = concat("rows of ", name, " that it does not have"),
                      .next = concat("give int64 numbers from 0 to ", all - 1)});
  std::vector<int64_t> sizes = sizes_[key];
  sizes.resize(std::max<size_t>(sizes.size(), 1));
  sizes.front() = rows.numel();
  return pull_rows(key, rows).reshape(sizes);
}

// ---- Sums over devices

void weighted_sum_into(const Tensor& into, std::span<const Term> terms, const ParallelFor& parallel_for) {
  const torch::ScalarType dtype = into.scalar_type();
  const auto run = [&](auto* sum) { sum_chunks(sum, terms, dtype, into.numel(), parallel_for); };
  if (dtype == torch::kFloat32) return run(into.mutable_data_ptr<float>());
  if (dtype == torch::kFloat64) return run(into.mutable_data_ptr<double>());
  const Tensor wide = torch::empty({into.numel()}, torch::kFloat32);
  run(wide.mutable_data_ptr<float>());
  into.copy_(wide);
}

// The calling thread copies what is not on the host, where the devices have no threads.
DeviceTensors Store::on_host(const DeviceTensors& values, size_t first_key) {
  if (sums_on_device_) return values;
  const auto copies = std::make_shared<DeviceTensors>(values);
  const bool on_gpus = devices_ != nullptr && devices_->on_gpus();
  host_.resize(values.size());
  for (size_t device = 0; device < values.size(); ++device) {
    auto& buffers = host_[device];
    buffers.resize(std::max(buffers.size(), first_key + values[device].size()));
    for (size_t i = 0; i < values[device].size(); ++i) {
      Tensor &copy = (*copies)[device][i], &buffer = buffers[first_key + i];
      if (!copy.defined()) continue;
      if (on_gpus && !buffer.defined()) buffer = pinned_like(copy);
      copy = on_gpus ? buffer : copy.cpu();
    }
  }
  if (!on_gpus) return *copies;
  devices_->run([values, copies](Device& device) {
    const torch::NoGradGuard no_grad;
    if (device.index() >= std::ssize(values)) return;
    const auto& from = values[device.index()];
    for (size_t i = 0; i < from.size(); ++i)
      if (from[i].defined()) copy_between((*copies)[device.index()][i], from[i]);
  });
  return *copies;
}

Tensors Store::sum(const DeviceTensors& values, size_t first_key) {
  if (values.size() == 1) return values.front();
  if (!sums_on_device_) return sum_on_cpu(values, first_key);
  devices_->run([values](Device& device) {
    for (const Tensor& value : values[device.index()])
      if (value.defined()) device.reduce(value);
  });
  return values.front();
}

Tensors Store::sum_on_cpu(const DeviceTensors& values, size_t first_key) {
  const size_t keys = values.front().size();
  buffers_.resize(std::max(buffers_.size(), first_key + keys));
  Tensors sums(keys);
  for (size_t key = 0; key < keys; ++key) {
    if (!values.front()[key].defined()) continue;
    Tensor& buffer = buffers_[first_key + key];
    if (!buffer.defined()) buffer = torch::empty_like(values.front()[key]).detach();
    std::vector<Term> terms;
    for (const auto& device : values) terms.push_back({dense_view(device[key]).const_data_ptr(), 1.0});
    const bool divide = devices_ != nullptr && buffer.numel() > kWorthDividing;
    weighted_sum_into(dense_view(buffer), terms, divide ? ParallelFor(on_all(*devices_)) : on_own_cores);
    sums[key] = buffer;
  }
  return sums;
}

}  // namespace lockstep
