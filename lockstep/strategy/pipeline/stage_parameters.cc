// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/stage_parameters.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "lockstep/base/received.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

constexpr int kMoveTag = 2;  // beside those of links.cc

std::set<const void*> tensors_in(const Piece& piece) {
  std::set<const void*> tensors;
  for (const torch::nn::Module* module : piece.modules) {
    for (const torch::Tensor& each : module->parameters()) tensors.insert(each.unsafeGetTensorImpl());
    for (const torch::Tensor& each : module->buffers()) tensors.insert(each.unsafeGetTensorImpl());
  }
  return tensors;
}

std::vector<int> all_stages(const Cut& cut) {
  std::vector<int> stages(to_size(cut.size()));
  std::iota(stages.begin(), stages.end(), 0);
  return stages;
}

// One of the ranks has no gradient where others have one: zeros then.
void sum_gradients_over(const World& world, const std::vector<NamedTensor>& parameters) {
  if (world.size() == 1 || parameters.empty()) return;
  std::vector<std::int64_t> has_gradient;
  for (const auto& [name, parameter] : parameters) has_gradient.push_back(parameter.grad().defined() ? 1 : 0);
  const torch::Tensor ranks_with_gradient = torch::tensor(has_gradient, torch::kInt64);
  world.all_reduce(ranks_with_gradient);
  const auto* with_gradient = ranks_with_gradient.const_data_ptr<std::int64_t>();
  for (auto [name, parameter] : parameters)
    if (*with_gradient++ > 0) world.all_reduce(dense_gradient(parameter));
}

}  // namespace

bool StagedTensor::is_used_by(int stage) const { return std::ranges::find(stages, stage) != stages.end(); }

StagedTensors stage_tensors(const torch::nn::Module& model, const std::vector<Piece>& pieces, const Cut& cut) {
  std::vector<std::set<const void*>> of_stage;
  for (const Range& range : cut) {
    of_stage.emplace_back();
    for (const Piece& piece : pieces_in(pieces, range)) of_stage.back().merge(tensors_in(piece));
  }
  StagedTensors all;
  for (const NamedTensor& each : named_parameters(model)) all.push_back({.named = each, .stages = {}});
  for (const NamedTensor& each : named_buffers(model)) all.push_back({.named = each, .stages = {}, .is_buffer = true});
  for (StagedTensor& each : all) {
    for (int stage = 0; stage < cut.size(); ++stage)
      if (of_stage[to_size(stage)].contains(each.named.tensor.unsafeGetTensorImpl())) each.stages.push_back(stage);
    if (each.stages.empty()) each.stages = all_stages(cut);
  }
  return all;
}

std::vector<torch::Tensor> tensors_of(const StagedTensors& all, int stage) {
  std::vector<torch::Tensor> tensors;
  for (const StagedTensor& each : all)
    if (each.is_used_by(stage)) tensors.push_back(each.named.tensor);
  return tensors;
}

std::vector<double> bytes_of(const std::vector<Piece>& pieces) {
  std::vector<double> bytes;
  for (const Piece& piece : pieces) {
    bytes.push_back(1);
    for (const torch::nn::Module* module : piece.modules) {
      for (const torch::Tensor& each : module->parameters()) bytes.back() += static_cast<double>(each.nbytes());
      for (const torch::Tensor& each : module->buffers()) bytes.back() += static_cast<double>(each.nbytes());
    }
  }
  return bytes;
}

// All ranks go through the tensors in the same order, and through the stages that get one; so each message is received
// before its sender goes on, and no rank has more than one tensor twice.
OptimizerStates move_tensors(const StagedTensors& before, const StagedTensors& after, const PipelineRanks& ranks,
                             const Optimizer& optimizer) {
  const torch::NoGradGuard no_grad;
  const World& stages = ranks.of_replica;
  OptimizerStates states;
  const auto state_of = [&](const StagedTensor& each) {
    const bool trained = !each.is_buffer && each.named.tensor.requires_grad();
    return trained ? optimizer.state_of(each.named.tensor) : Optimizer::StateTensors{};
  };
  for (std::size_t i = 0; i < before.size(); ++i) {
    const torch::Tensor& tensor = before[i].named.tensor;
    const bool mine_before = before[i].is_used_by(stages.rank());
    if (mine_before && after[i].is_used_by(stages.rank()))
      for (const auto& [name, value] : state_of(before[i])) states[tensor.unsafeGetTensorImpl()][name] = value.clone();
    for (const int stage : after[i].stages) {
      if (before[i].is_used_by(stage)) continue;
      if (stages.rank() == before[i].stages.front()) {
        TensorSender sender(stages, stage, kMoveTag);
        Tensors message = message_of(state_of(before[i]));
        message.insert(message.begin(), tensor);
        sender.send(message);
        sender.finish();
      } else if (stages.rank() == stage) {
        Tensors message = receive_tensors(stages, before[i].stages.front(), kMoveTag);
        Received(concat("stage ", before[i].stages.front()))
            .require(!message.empty() && message.front().defined() && message.front().sizes() == tensor.sizes(),
                     concat("it is not the tensor ", before[i].named.name));
        put_data(tensor, torch::empty_like(tensor, tensor.options().device(stages.device())).copy_(message.front()));
        message.erase(message.begin());
        states[tensor.unsafeGetTensorImpl()] = state_in(message);
      }
    }
  }
  for (std::size_t i = 0; i < before.size(); ++i)
    if (!after[i].is_used_by(stages.rank()) && is_held(before[i].named.tensor))
      put_data(before[i].named.tensor, on_meta(before[i].named.tensor));
  return states;
}

StageParameters::StageParameters(StagedTensors tensors, const PipelineRanks& ranks) : of_stage_(ranks.of_stage) {
  const int stage = ranks.of_replica.rank();
  groups_.push_back({.world = of_stage_, .parameters = {}});
  std::map<std::vector<int>, std::vector<NamedTensor>> shared;  // the same on every rank
  for (const StagedTensor& each : tensors) {
    if (each.is_buffer && each.is_used_by(stage)) buffers_.push_back(each.named);
    if (each.is_buffer) continue;
    if (each.stages.size() > 1) shared[each.stages].push_back(each.named);
    if (each.stages == std::vector{stage}) groups_.front().parameters.push_back(each.named);
  }
  for (const auto& [stages, parameters] : shared) {
    const bool mine = std::ranges::find(stages, stage) != stages.end();
    if (const auto world = ranks.all.split(mine ? 0 : -1, ranks.all.rank()))
      groups_.push_back({.world = *world, .parameters = parameters});
  }
}

void StageParameters::sum_gradients() {
  for (const Group& group : groups_) sum_gradients_over(group.world, group.parameters);
}

void StageParameters::broadcast() const {
  for (const Group& group : groups_) broadcast_tensors(group.world, group.parameters);
  broadcast_buffers();
}

void StageParameters::broadcast_buffers() const { broadcast_tensors(of_stage_, buffers_); }

}  // namespace lockstep
