#include "lockstep/kvstore.h"

#include <algorithm>
#include <cmath>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {
namespace {

constexpr std::int64_t kLargeWeight = std::int64_t{16} << 20;  // elements: where MXNet stops to update in its store

}  // namespace

void LocalKVStore::create(const std::vector<torch::Tensor>& values) {
  for (const torch::Tensor& value : values)
    values_.push_back(value.to(torch::kCPU, /*non_blocking=*/false, /*copy=*/true));
}

void LocalKVStore::set_optimizer(const StrategyOptions& options) {
  std::vector<torch::Tensor> trained;
  for (std::size_t key = 0; key < values_.size(); ++key)
    if (keys()[key].trained) trained.push_back(values_[key]);
  optimizer_ = make_optimizer(std::move(trained), options);
  optimizer_->attach(gradients_);
}

void LocalKVStore::push(KeyRange range, const DeviceTensors& values, const PushOptions& options) {
  const torch::NoGradGuard no_grad;
  if (optimizer_ != nullptr) update(range, values, options.learning_rate);
  for (std::int64_t key = range.first; key < range.last; ++key)
    if (optimizer_ == nullptr || !keys()[static_cast<std::size_t>(key)].trained) replace(key, range, values);
}

// The optimizer adds up what the devices have, in the pass in which it updates.
void LocalKVStore::update(KeyRange range, const DeviceTensors& values, double learning_rate) {
  DeviceTensors gradients(values.size());
  for (std::size_t key = 0; key < values_.size(); ++key) {
    if (!keys()[key].trained) continue;
    const std::int64_t place = static_cast<std::int64_t>(key) - range.first;
    const bool given = 0 <= place && place < range.size();
    for (std::size_t device = 0; device < values.size(); ++device)
      gradients[device].push_back(given ? values[device][static_cast<std::size_t>(place)] : torch::Tensor());
  }
  gradients_->set(std::move(gradients));
  if (!std::isnan(learning_rate)) set_learning_rate(*optimizer_, learning_rate);
  optimizer_->step();
}

void LocalKVStore::replace(std::int64_t key, KeyRange range, const DeviceTensors& values) {
  DeviceTensors of_key;
  for (const auto& device : values) of_key.push_back({device[static_cast<std::size_t>(key - range.first)]});
  const torch::Tensor sum = sum_.sum(of_key, key).front();
  if (sum.defined()) values_[static_cast<std::size_t>(key)].copy_(sum);
}

void LocalKVStore::pull(KeyRange range, const DeviceTensors& into) {
  sum_.copy_to_all({values_.begin() + range.first, values_.begin() + range.last}, into);
}

torch::Tensor LocalKVStore::row_sparse_pull(const std::string& name, const torch::Tensor& rows) {
  const std::int64_t key = number_of(name);
  require_rows(keys()[static_cast<std::size_t>(key)], rows);
  return values_[static_cast<std::size_t>(key)].index_select(0, rows);
}

ChosenKind choose_local_kind(const std::vector<NamedTensor>& parameters, int devices, torch::Device where) {
  if (devices == 1) return {KVStoreKind::kLocalUpdateCpu, "there is one device, and nothing to add up"};
  if (where.is_cpu())
    return {KVStoreKind::kLocalUpdateCpu, "devices that are cores read the weights where the store updates them, once"};
  const auto largest =
      std::ranges::max_element(parameters, {}, [](const NamedTensor& each) { return each.tensor.numel(); });
  const std::string weight =
      concat("the largest weight, ", largest->name, ", has ", with_thousands(largest->tensor.numel()), " elements");
  if (largest->tensor.numel() < kLargeWeight)
    return {KVStoreKind::kLocalUpdateCpu, concat(weight, ": small ones are updated once")};
  return {KVStoreKind::kLocalAllReduceDevice, concat(weight, ", and devices reach each other's memory")};
}

}  // namespace lockstep
