// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/averaging/background_sum.h"

#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/strategy/averaging/int8_blocks.h"

namespace lockstep {
namespace {

bool is_done_within(Work& work, milliseconds longest) {
  try {
    work.wait(longest);
  } catch (const PeerLost&) {
    if (!work.done()) return false;
    work.wait();
  }
  return true;
}

// One zero in all places.
Tensor nothing_lost(const Tensor& part) {
  return torch::zeros({}, torch::TensorOptions(part.scalar_type())).expand({part.numel()});
}

}  // namespace

BackgroundSum::BackgroundSum(const World& world, const Tensors& parts, bool in_int8)
    : machine_(world.split(world.node_rank()).value()),
      firsts_(world.split(world.local_rank() == 0 ? 0 : -1)),
      under_way_(parts.size()) {
  const Tensor firsts = torch::tensor({firsts_ ? 1 : 0}, torch::kInt64);
  world.all_reduce(firsts);
  machines_ = firsts.item<int64_t>();
  if (!in_int8) return;
  for (const Tensor& part : parts)
    lost_.push_back(machines_ > 1 ? nothing_lost(part).contiguous() : nothing_lost(part));
}

int64_t BackgroundSum::start(size_t part, const Tensor& mine) {
  const torch::NoGradGuard no_grad;
  machine_.reduce(mine);
  if (std::exchange(lost_is_sum_, false) && sends_int8())
    for (const Tensor& lost : lost_) lost.div_(machines_);
  UnderWay& now = under_way_[part];
  if (!sends_int8()) {
    if (!lost_.empty()) {  // by a run on several machines
      mine.add_(lost_[part]);
      lost_[part] = nothing_lost(mine);
    }
    now.tensor = mine;
    if (firsts_) now.work = firsts_->all_reduce_async(mine);
    return to_int64(mine.nbytes());
  }
  now.tensor = torch::empty({machines_, int8_bytes(mine.numel())}, torch::kUInt8);
  if (firsts_) now.work = firsts_->all_gather_async(take_int8(lost_[part].add_(mine)), {.output = now.tensor});
  return now.tensor.size(1);
}

Tensor BackgroundSum::finish(size_t part) {
  const torch::NoGradGuard no_grad;
  const auto [arrived, work] = std::exchange(under_way_[part], {});
  share(arrived, work);
  if (!sends_int8()) return arrived;
  Tensor sum = torch::zeros_like(lost_[part]);
  for (const Tensor& bytes : arrived.unbind()) sum.add_(from_int8(bytes, sum.numel(), sum.options()));
  return sum;
}

// The first rank tells the others now and then that it still waits: so each of their waits is short, however slow the links.
void BackgroundSum::share(const Tensor& tensor, std::optional<Work> work) {
  const Tensor has_come = torch::zeros({1}, torch::kBool);
  while (!has_come.item<bool>()) {
    if (work) has_come.fill_(is_done_within(*work, machine_.timeout() / 4));
    machine_.broadcast(has_come);
  }
  machine_.broadcast(tensor);
}

void BackgroundSum::even_out() {
  if (std::exchange(lost_is_sum_, true) || !sends_int8()) return;
  const torch::NoGradGuard no_grad;
  for (const Tensor& lost : lost_) {
    std::optional<Work> work;
    if (firsts_) work = firsts_->all_reduce_async(lost);
    share(lost, work);
  }
}

NamedTensors BackgroundSum::state() {
  NamedTensors tensors;
  for (size_t i = 0; i < lost_.size(); ++i) tensors.push_back({concat("lost.", i), lost_[i] = lost_[i].contiguous()});
  return tensors;
}

}  // namespace lockstep
