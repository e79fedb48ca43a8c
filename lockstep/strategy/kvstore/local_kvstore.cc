#include "lockstep/strategy/kvstore/local_kvstore.h"

#include <algorithm>
#include <cmath>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/strategy/replica.h"

namespace lockstep {
namespace {

constexpr std::int64_t kLargeWeight = std::int64_t{16} << 20;  // elements: where MXNet stops to update in its store

std::vector<torch::Tensor> trained_of(const std::vector<Key>& keys, const std::vector<torch::Tensor>& values) {
  std::vector<torch::Tensor> trained;
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (keys[i].trained) trained.push_back(values[i]);
  return trained;
}

}  // namespace

void LocalKVStore::create(const std::vector<torch::Tensor>& values) {
  for (const torch::Tensor& value : values) values_.push_back(value.clone());
}

void LocalKVStore::set_optimizer(const StrategyOptions& options) {
  optimizer_ = make_optimizer(trained_of(keys(), values_), options);
}

void LocalKVStore::push(KeyRange range, const DeviceTensors& values, const PushOptions& options) {
  const torch::NoGradGuard no_grad;
  const std::vector<torch::Tensor> merged = sum_.sum(values, range.first);
  for (std::size_t i = 0; i < merged.size(); ++i) {
    const std::size_t key = static_cast<std::size_t>(range.first) + i;
    if (optimizer_ && keys()[key].trained)
      values_[key].mutable_grad() = merged[i];
    else if (merged[i].defined())
      values_[key].copy_(merged[i]);
  }
  if (!optimizer_) return;
  if (!std::isnan(options.learning_rate)) set_learning_rate(*optimizer_, options.learning_rate);
  optimizer_->step();
  for (torch::Tensor& value : values_) value.mutable_grad() = torch::Tensor();
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
  if (devices == 1) return {"local_update_cpu", "there is one device, and nothing to add up"};
  const auto largest = std::ranges::max_element(parameters, {}, [](const NamedTensor& each) { return each.tensor.numel(); });
  const std::string weight = concat("the largest weight, ", largest->name, ", has ",
                                    with_thousands(largest->tensor.numel()), " elements");
  if (largest->tensor.numel() < kLargeWeight) return {"local_update_cpu", concat(weight, ": small ones are updated once")};
  if (where.is_cuda()) return {"local_allreduce_device", concat(weight, ", and devices reach each other's memory")};
  return {"local_allreduce_cpu", concat(weight, ": every device updates, and devices that are cores share the CPU's memory")};
}

}  // namespace lockstep
