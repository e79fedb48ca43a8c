// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/local_store.h"

#include <algorithm>
#include <cmath>

#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {
namespace {

int64_t bytes_of(const Tensor& value) { return to_int64(value.nbytes()); }

}  // namespace

void LocalStore::create(const Tensors& values) {
  for (const Tensor& value : values) {
    if (sums_on_device() || value.is_cpu())
      values_.push_back(value.clone());
    else
      values_.push_back(value.to(torch::kCPU).pin_memory());
  }
}

void LocalStore::set_optimizer(const UpdateOptions& options) {
  Tensors trained;
  for (size_t key = 0; key < values_.size(); ++key)
    if (keys()[key].trained) trained.push_back(values_[key]);
  optimizer_ = make_optimizer(std::move(trained), options);
  optimizer_->attach(gradients_);
}

void LocalStore::push(KeyRange range, const DeviceTensors& values, const PushOptions& options) {
  const torch::NoGradGuard no_grad;
  for (const auto& device : values)
    for (const Tensor& value : device) bytes_pushed_ += value.defined() ? bytes_of(value) : 0;
  DeviceTensors left = on_host(values, range.first);
  if (optimizer_ != nullptr) update(range, left, options.learning_rate);
  const Tensors sums = sum(left, range.first);
  for (size_t i = 0; i < range.size(); ++i)
    if (sums[i].defined()) values_[range.first + i].copy_(sums[i]);
}

// Takes the gradients of trained keys out of `values`. The optimizer has all trained keys as its parameters, so each
// device's list gets a place for every one of them: those outside of `range` have no gradient and stay as they are. The
// optimizer sums over the lists in the pass that updates.
void LocalStore::update(KeyRange range, DeviceTensors& values, double learning_rate) {
  DeviceTensors gradients(values.size());
  for (size_t key = 0; key < values_.size(); ++key) {
    if (!keys()[key].trained) continue;
    const bool given = range.first <= key && key < range.last;
    for (size_t device = 0; device < values.size(); ++device)
      gradients[device].push_back(given ? std::exchange(values[device][key - range.first], {}) : Tensor());
  }
  gradients_->set(std::move(gradients));
  if (!std::isnan(learning_rate)) set_learning_rate(*optimizer_, learning_rate);
  optimizer_->step();
}

// Copies nothing where a device's tensor is the store's own memory.
void LocalStore::pull(KeyRange range, const DeviceTensors& into) {
  for (const auto& device : into)
    for (size_t i = 0; i < range.size(); ++i)
      if (device[i].defined() && !device[i].is_alias_of(values_[range.first + i])) bytes_pulled_ += bytes_of(device[i]);
  on_every_device(into.size(), [values = values_, range, into](size_t device) {
    const torch::NoGradGuard no_grad;
    for (size_t key = range.first; key < range.last; ++key)
      if (Tensor to = into[device][key - range.first]; to.defined() && !to.is_alias_of(values[key]))
        copy_between(to, values[key]);
  });
}

std::string not_linked(const std::vector<torch::Device>& gpus) {
  for (const torch::Device one : gpus)
    for (const torch::Device other : gpus)
      if (!gpu_reaches(one, other)) return concat(one.str(), " and ", other.str());
  return "";
}

ChosenKind choose_local_kind(const NamedTensors& parameters, int devices, const std::optional<std::string>& separate) {
  if (devices == 1) return {KVStoreKind::kLocalUpdateCpu, "there is one device, and nothing to add up"};
  if (!separate)
    return {KVStoreKind::kLocalUpdateCpu, "devices that are cores read the weights where the store updates them, once"};
  if (separate->empty()) return {KVStoreKind::kLocalAllReduceDevice, "all devices reach each other's memory"};
  const auto largest =
      std::ranges::max_element(parameters, {}, [](const NamedTensor& each) { return each.tensor.numel(); });
  const std::string reason = concat(*separate, " don't reach each other's memory; the largest weight, ", largest->name,
                                    ", has ", with_thousands(largest->tensor.numel()), " elements");
  constexpr int64_t kLargeWeight = int64_t{16} << 20;  // elements: where MXNet stops to update in its store
  const bool small = largest->tensor.numel() < kLargeWeight;
  return {small ? KVStoreKind::kLocalUpdateCpu : KVStoreKind::kLocalAllReduceCpu, reason};
}

}  // namespace lockstep
