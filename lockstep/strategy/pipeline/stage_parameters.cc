// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/stage_parameters.h"

#include <algorithm>

#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

constexpr int kStateTag = 2;  // beside those of links.cc

bool contains(const std::vector<torch::Tensor>& all, const torch::Tensor& one) {
  return std::ranges::any_of(all, [&](const torch::Tensor& each) { return each.is_same(one); });
}

}  // namespace

StageParameters::StageParameters(const std::vector<Piece>& pieces, const Cut& cut) {
  std::vector<torch::Tensor> seen;
  for (const Range& range : cut) {
    const auto own = pieces_in(pieces, range);
    OfStage stage{.used = parameters_of(own), .owned = {}, .buffers = {}};
    for (const torch::Tensor& parameter : stage.used) {
      if (!contains(seen, parameter)) {
        stage.owned.push_back(parameter);
        seen.push_back(parameter);
      } else if (!contains(shared_, parameter)) {
        shared_.push_back(parameter);
      }
    }
    for (const Piece& piece : own)
      for (const torch::nn::Module* module : piece.modules)
        for (const torch::Tensor& buffer : module->buffers()) stage.buffers.push_back(buffer);
    stages_.push_back(std::move(stage));
  }
}

// First what a stage has for itself, over its replicas; then shared parameters, over all ranks, in the same order on each.
// A rank whose stage does not use a shared parameter adds zeros, and forgets the sum.
void StageParameters::sum_gradients(const PipelineRanks& ranks) {
  if (ranks.of_stage.size() > 1) sum_owned_gradients(ranks);
  for (torch::Tensor& parameter : shared_) {
    ranks.all.all_reduce(dense_gradient(parameter));
    if (!contains(stages_[ranks.of_replica.rank()].used, parameter)) parameter.mutable_grad() = torch::Tensor();
  }
}

void StageParameters::sum_owned_gradients(const PipelineRanks& ranks) {
  std::vector<torch::Tensor>& parameters = stages_[ranks.of_replica.rank()].owned;
  std::vector<std::int64_t> has_gradient;
  for (const torch::Tensor& parameter : parameters) has_gradient.push_back(parameter.grad().defined() ? 1 : 0);
  const torch::Tensor replicas_with_gradient = torch::tensor(has_gradient, torch::kInt64);
  ranks.of_stage.all_reduce(replicas_with_gradient);
  const auto* with_gradient = replicas_with_gradient.const_data_ptr<std::int64_t>();
  for (torch::Tensor& parameter : parameters)
    if (*with_gradient++ > 0 && !contains(shared_, parameter)) ranks.of_stage.all_reduce(dense_gradient(parameter));
}

void StageParameters::broadcast(const PipelineRanks& ranks) const {
  for (int stage = 0; stage < stages_.size(); ++stage) {
    std::vector<NamedTensor> tensors;
    for (const torch::Tensor& parameter : stages_[stage].owned) tensors.push_back({"parameter", parameter});
    for (const torch::Tensor& buffer : stages_[stage].buffers) tensors.push_back({"buffer", buffer});
    broadcast_tensors(ranks.all, tensors, stage);
  }
}

void StageParameters::collect_state(const PipelineRanks& ranks, Optimizer& optimizer) const {
  const int stage = ranks.of_replica.rank();
  if (ranks.of_stage.rank() > 0) return;
  if (stage > 0) {
    TensorSender sender(ranks.of_replica, 0, kStateTag);
    for (const torch::Tensor& parameter : stages_[stage].owned) sender.send(message_of(optimizer.state_of(parameter)));
    return sender.finish();
  }
  for (int from = 1; from < stages_.size(); ++from)
    for (const torch::Tensor& parameter : stages_[from].owned)
      optimizer.set_state(parameter, state_in(receive_tensors(ranks.of_replica, from, kStateTag)));
}

}  // namespace lockstep
