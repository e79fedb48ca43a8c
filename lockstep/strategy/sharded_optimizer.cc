#include "lockstep/strategy/sharded_optimizer.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

// The learning rate is all that the sharded optimizer itself needs to know.
struct Rate {
  double lr = 0;
};

std::vector<torch::Tensor> all_of(const ShardedOptimizer::Shards& shards) {
  std::vector<torch::Tensor> all;
  for (const auto& shard : shards) all.insert(all.end(), shard.begin(), shard.end());
  return all;
}

std::unique_ptr<torch::optim::OptimizerOptions> rate_of(const std::vector<torch::Tensor>& parameters,
                                                        const ShardedOptimizer::MakeOptimizer& make) {
  const double lr = make(parameters)->param_groups().front().options().get_lr();
  return std::make_unique<GroupOptions<Rate>>(Rate{.lr = lr});
}

std::int64_t values_in(const std::vector<torch::Tensor>& shard) {
  std::int64_t values = 0;
  for (const torch::Tensor& parameter : shard) values += parameter.numel();
  return values;
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(Devices& devices, const Shards& shards, const MakeOptimizer& make)
    : Optimizer(all_of(shards), rate_of(all_of(shards), make)), devices_(devices) {
  for (const auto& shard : shards) optimizers_.push_back(shard.empty() ? nullptr : make(shard));
}

std::size_t ShardedOptimizer::shard_of(const torch::Tensor& parameter) const {
  for (std::size_t i = 0; i < optimizers_.size(); ++i)
    if (optimizers_[i] != nullptr)
      for (const torch::Tensor& own : optimizers_[i]->param_groups().front().params())
        if (own.is_same(parameter)) return i;
  throw UsageError({.what = concat("a tensor of shape ", parameter.sizes(), " is not a parameter of this optimizer")});
}

Optimizer::StateTensors ShardedOptimizer::state_of(const torch::Tensor& parameter) const {
  return optimizers_[shard_of(parameter)]->state_of(parameter);
}

void ShardedOptimizer::set_state(const torch::Tensor& parameter, const StateTensors& state) {
  optimizers_[shard_of(parameter)]->set_state(parameter, state);
}

void ShardedOptimizer::update(torch::optim::OptimizerParamGroup& group, const std::vector<torch::Tensor>&) {
  devices_.run([optimizers = optimizers_, lr = group.options().get_lr()](Device& device) {
    const auto& mine = optimizers[static_cast<std::size_t>(device.index())];
    if (mine == nullptr) return;
    set_learning_rate(*mine, lr);
    mine->step();
  });
}

ShardedOptimizer::Shards even_shards(const std::vector<torch::Tensor>& parameters, int shards) {
  std::vector<torch::Tensor> by_size = parameters;
  std::stable_sort(by_size.begin(), by_size.end(), [](const auto& a, const auto& b) { return a.numel() > b.numel(); });
  ShardedOptimizer::Shards lists(static_cast<std::size_t>(shards));
  for (const torch::Tensor& parameter : by_size)
    std::min_element(lists.begin(), lists.end(), [](const auto& a, const auto& b) {
      return values_in(a) < values_in(b);
    })->push_back(parameter);
  return lists;
}

}  // namespace lockstep
