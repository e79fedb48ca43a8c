// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/averaging/background_sum.h"

#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/strategy/averaging/int8_blocks.h"

namespace lockstep {

BackgroundSum::BackgroundSum(const World& world, const Tensors& parts, bool in_int8)
    : machine_(world.split(world.node_rank()).value()),
      firsts_(world.split(world.local_rank() == 0 ? 0 : -1)),
      under_way_(parts.size()) {
  const torch::Tensor firsts = torch::tensor({firsts_ ? 1 : 0}, torch::kInt64);
  world.all_reduce(firsts);
  machines_ = firsts.item<int64_t>();
  if (!in_int8 || machines_ == 1) return;
  for (const torch::Tensor& part : parts)
    lost_.push_back(torch::zeros({part.numel()}, torch::TensorOptions(part.scalar_type())));
}

void BackgroundSum::start(size_t part, const Tensor& mine) {
  const torch::NoGradGuard no_grad;
  machine_.reduce(mine);
  UnderWay& now = under_way_[part];
  if (lost_.empty()) {
    now.tensor = mine;
    if (firsts_) now.work = firsts_->all_reduce_async(mine);
    bytes_per_machine_ += static_cast<int64_t>(mine.nbytes());
    return;
  }
  const int64_t bytes = int8_bytes(mine.numel());
  now.tensor = torch::empty({machines_, bytes}, torch::kUInt8);
  if (firsts_) now.work = firsts_->all_gather_async(take_int8(lost_[part].add_(mine)), {.output = now.tensor});
  bytes_per_machine_ += bytes;
}

Tensor BackgroundSum::finish(size_t part) {
  const torch::NoGradGuard no_grad;
  auto [arrived, work] = std::exchange(under_way_[part], {});
  if (work) work->wait();
  machine_.broadcast(arrived);
  if (lost_.empty()) return arrived;
  torch::Tensor sum = torch::zeros_like(lost_[part]);
  for (const torch::Tensor& bytes : arrived.unbind()) sum.add_(from_int8(bytes, sum.numel(), sum.options()));
  return sum;
}

void BackgroundSum::even_out() {
  const torch::NoGradGuard no_grad;
  for (const torch::Tensor& lost : lost_) {
    if (firsts_) firsts_->all_reduce(lost, ReduceOp::kMean);
    machine_.broadcast(lost);
  }
}

NamedTensors BackgroundSum::state() const {
  NamedTensors tensors;
  for (size_t i = 0; i < lost_.size(); ++i) tensors.push_back({concat("lost.", i), lost_[i]});
  return tensors;
}

}  // namespace lockstep
