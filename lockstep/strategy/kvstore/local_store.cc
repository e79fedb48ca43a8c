// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/local_store.h"

#include <algorithm>
#include <cmath>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {

void LocalStore::create(const std::vector<torch::Tensor>& values) {
  for (const torch::Tensor& value : values)
    values_.push_back(value.to(torch::kCPU, /*non_blocking=*/false, /*copy=*/true));
}

void LocalStore::set_optimizer(const UpdateOptions& options) {
  std::vector<torch::Tensor> trained;
  for (std::size_t key = 0; key < values_.size(); ++key)
    if (keys()[key].trained) trained.push_back(values_[key]);
  optimizer_ = make_optimizer(std::move(trained), options);
  optimizer_->attach(gradients_);
}

void LocalStore::push(KeyRange range, const DeviceTensors& values, const PushOptions& options) {
  const torch::NoGradGuard no_grad;
  DeviceTensors left = values;
  if (optimizer_ != nullptr) update(range, left, options.learning_rate);
  const std::vector<torch::Tensor> sums = sum(left, range.first);
  for (std::size_t i = 0; i < range.size(); ++i)
    if (sums[i].defined()) values_[range.first + i].copy_(sums[i]);
}

// Takes the gradients of trained keys out of `values`. The optimizer has all trained keys as its parameters, so each
// device's list gets a place for every one of them: those outside of `range` have no gradient and stay as they are. The
// optimizer sums over the lists in the pass that updates.
void LocalStore::update(KeyRange range, DeviceTensors& values, double learning_rate) {
  DeviceTensors gradients(values.size());
  for (std::size_t key = 0; key < values_.size(); ++key) {
    if (!keys()[key].trained) continue;
    const bool given = range.first <= key && key < range.last;
    for (std::size_t device = 0; device < values.size(); ++device)
      gradients[device].push_back(given ? std::exchange(values[device][key - range.first], {}) : torch::Tensor());
  }
  gradients_->set(std::move(gradients));
  if (!std::isnan(learning_rate)) set_learning_rate(*optimizer_, learning_rate);
  optimizer_->step();
}

// Where a device's tensor is the store's own memory nothing is copied.
void LocalStore::pull(KeyRange range, const DeviceTensors& into) {
  on_every_device(into.size(), [values = values_, range, into](std::size_t device) {
    const torch::NoGradGuard no_grad;
    for (std::size_t key = range.first; key < range.last; ++key)
      if (torch::Tensor to = into[device][key - range.first]; to.defined() && !to.is_alias_of(values[key]))
        to.copy_(values[key]);
  });
}

ChosenKind choose_local_kind(const std::vector<NamedTensor>& parameters, int devices, torch::Device where) {
  if (devices == 1) return {KVStoreKind::kLocalUpdateCpu, "there is one device, and nothing to add up"};
  if (where.is_cpu())
    return {KVStoreKind::kLocalUpdateCpu, "devices that are cores read the weights where the store updates them, once"};
  const auto largest =
      std::ranges::max_element(parameters, {}, [](const NamedTensor& each) { return each.tensor.numel(); });
  const std::string weight =
      concat("the largest weight, ", largest->name, ", has ", with_thousands(largest->tensor.numel()), " elements");
  constexpr std::int64_t kLargeWeight = std::int64_t{16} << 20;  // elements: where MXNet stops to update in its store
  if (largest->tensor.numel() < kLargeWeight)
    return {KVStoreKind::kLocalUpdateCpu, concat(weight, ": small ones are updated once")};
  return {KVStoreKind::kLocalAllReduceDevice, concat(weight, ", and devices reach each other's memory")};
}

}  // namespace lockstep
