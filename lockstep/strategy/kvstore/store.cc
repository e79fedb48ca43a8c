// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/store.h"

#include <algorithm>
#include <span>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/world.h"

namespace lockstep {
namespace {

constexpr std::int64_t kWorthDividing = 1 << 16;  // elements: below it, waking the devices costs more
constexpr std::int64_t kRunsPerTask = 4;

// In runs of kMaxChunk elements, which stay in the first-level cache while all terms are added to them. Each run is
// written by one thread and its order of summation is fixed, so the bits do not depend on the number of threads.
template <class T>
void sum_runs(T* into, std::span<const Term> terms, torch::ScalarType dtype, std::int64_t count,
              const ParallelFor& parallel_for) {
  const std::int64_t runs = (count + kMaxChunk - 1) / kMaxChunk;
  parallel_for(0, runs, kRunsPerTask, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t begin = first * kMaxChunk; begin < std::min(last * kMaxChunk, count); begin += kMaxChunk)
      weighted_sum(terms, dtype, begin, std::min(kMaxChunk, count - begin), into + begin);
  });
}

Key key_of(const NamedTensor& value, bool trained) {
  return {.name = value.name,
          .elements = value.tensor.numel(),
          .rows = value.tensor.dim() > 0 && value.tensor.numel() > 0 ? value.tensor.size(0) : 1,
          .sizes = value.tensor.sizes().vec(),
          .dtype = value.tensor.scalar_type(),
          .trained = trained};
}

void require_rows(const Key& key, const torch::Tensor& rows) {
  const bool good =
      rows.scalar_type() == torch::kInt64 && rows.dim() == 1 &&
      (rows.numel() == 0 || (rows.min().item<std::int64_t>() >= 0 && rows.max().item<std::int64_t>() < key.rows));
  if (good) return;
  throw UsageError({.what = concat("rows of ", key.name, " that it does not have"),
                    .next = concat("give int64 numbers from 0 to ", key.rows - 1)});
}

// Without threads for the devices, the calling thread copies what is not on the host.
DeviceTensors without_devices(DeviceTensors values) {
  for (auto& device : values)
    for (torch::Tensor& value : device)
      if (value.defined()) value = value.cpu();
  return values;
}

}  // namespace

void Store::init(const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& buffers) {
  if (!keys_.empty())
    throw UsageError({.what = "init() of a store that has its keys", .next = "give all keys at once"});
  std::vector<torch::Tensor> tensors;
  const auto add = [&](const NamedTensor& value, bool trained) {
    if (!numbers_.emplace(value.name, keys_.size()).second)
      throw UsageError({.what = concat("two values for the key ", value.name)});
    keys_.push_back(key_of(value, trained));
    tensors.push_back(value.tensor.detach());
  };
  for (const NamedTensor& value : values) add(value, true);
  for (const NamedTensor& buffer : buffers) add(buffer, false);
  create(tensors);
}

std::size_t Store::number_of(const std::string& name) const {
  if (const auto found = numbers_.find(name); found != numbers_.end()) return found->second;
  throw UsageError({.what = concat("the store has no key ", name), .next = "give init() every key"});
}

// Calls `call` for each run of names whose keys are neighbours, with a function that cuts the run out of DeviceTensors.
template <class Call>
void Store::for_each_run(const Names& names, const Call& call) const {
  std::vector<std::size_t> numbers;
  for (const std::string& name : names) numbers.push_back(number_of(name));
  for (std::size_t first = 0, last = 0; first < numbers.size(); first = last) {
    for (last = first + 1; last < numbers.size() && numbers[last] == numbers[last - 1] + 1;) ++last;
    call(KeyRange{numbers[first], numbers[last - 1] + 1}, [first, last](const DeviceTensors& tensors) {
      DeviceTensors run;
      for (const auto& device : tensors) {
        const auto keys = std::span(device).subspan(first, last - first);
        run.emplace_back(keys.begin(), keys.end());
      }
      return run;
    });
  }
}

// Throws DeviceError.
void Store::require_on_devices(const Names& names, const DeviceTensors& tensors) const {
  if (devices_ == nullptr) return;
  for (int device = 0; device < std::min(devices_->size(), static_cast<int>(tensors.size())); ++device)
    for (std::size_t i = 0; i < names.size(); ++i)
      if (const torch::Tensor& tensor = tensors[to_size(device)].at(i); tensor.defined())
        require_device(tensor, devices_->where(device), concat("the tensor of ", names[i], " for the store"));
}

void Store::push(const Names& names, const DeviceTensors& values, const PushOptions& options) {
  require_on_devices(names, values);
  for_each_run(names, [&](KeyRange keys, const auto& run_of) { push(keys, run_of(values), options); });
}

void Store::pull(const Names& names, const DeviceTensors& into) {
  require_on_devices(names, into);
  for_each_run(names, [&](KeyRange keys, const auto& run_of) { pull(keys, run_of(into)); });
}

void Store::push_pull(const Names& names, const DeviceTensors& values, const DeviceTensors& into,
                      const PushOptions& options) {
  require_on_devices(names, values);
  require_on_devices(names, into);
  for_each_run(names,
               [&](KeyRange keys, const auto& run_of) { push_pull(keys, run_of(values), run_of(into), options); });
}

void Store::push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                      const PushOptions& options) {
  push(keys, values, options);
  pull(keys, into);
}

torch::Tensor Store::row_sparse_pull(const std::string& name, const torch::Tensor& rows) {
  const std::size_t key = number_of(name);
  require_rows(keys_[key], rows);
  std::vector<std::int64_t> sizes = keys_[key].sizes;
  if (sizes.empty()) sizes.resize(1);
  sizes.front() = rows.numel();
  return pull_rows(key, rows).reshape(sizes);
}

// ---- Sums over devices

void weighted_sum_into(const torch::Tensor& into, std::span<const Term> terms, const ParallelFor& parallel_for) {
  const torch::ScalarType dtype = into.scalar_type();
  const auto run = [&](auto* sum) { sum_runs(sum, terms, dtype, into.numel(), parallel_for); };
  if (dtype == torch::kFloat32) return run(into.mutable_data_ptr<float>());
  if (dtype == torch::kFloat64) return run(into.mutable_data_ptr<double>());
  const torch::Tensor wide = torch::empty({into.numel()}, torch::kFloat32);
  run(wide.mutable_data_ptr<float>());
  into.copy_(wide);
}

DeviceTensors Store::on_host(const DeviceTensors& values, std::size_t first_key) {
  if (sums_on_device()) return values;
  if (devices_ == nullptr || !devices_->on_gpus()) return without_devices(values);
  host_.resize(values.size());
  const auto copies = std::make_shared<DeviceTensors>(values);
  for (std::size_t device = 0; device < values.size(); ++device) {
    auto& buffers = host_[device];
    buffers.resize(std::max(buffers.size(), first_key + values[device].size()));
    for (std::size_t i = 0; i < values[device].size(); ++i) {
      const torch::Tensor& value = values[device][i];
      torch::Tensor& buffer = buffers[first_key + i];
      if (value.defined() && !buffer.defined()) buffer = pinned_like(value);
      (*copies)[device][i] = value.defined() ? buffer : torch::Tensor();
    }
  }
  devices_->run([values, copies](Device& device) {
    const torch::NoGradGuard no_grad;
    if (device.index() >= std::ssize(values)) return;
    const auto& from = values[device.index()];
    for (std::size_t i = 0; i < from.size(); ++i)
      if (from[i].defined()) copy_between((*copies)[device.index()][i], from[i]);
  });
  return *copies;
}

std::vector<torch::Tensor> Store::sum(const DeviceTensors& values, std::size_t first_key) {
  if (values.size() == 1) return values.front();
  if (where_ == SumOn::kCpu) return sum_on_cpu(values, first_key);
  devices_->run([values](Device& device) {
    for (const torch::Tensor& value : values[device.index()])
      if (value.defined()) device.reduce(value);
  });
  return values.front();
}

std::vector<torch::Tensor> Store::sum_on_cpu(const DeviceTensors& values, std::size_t first_key) {
  const std::size_t keys = values.front().size();
  buffers_.resize(std::max(buffers_.size(), first_key + keys));
  std::vector<torch::Tensor> sums(keys);
  for (std::size_t key = 0; key < keys; ++key) {
    if (!values.front()[key].defined()) continue;
    torch::Tensor& buffer = buffers_[first_key + key];
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
