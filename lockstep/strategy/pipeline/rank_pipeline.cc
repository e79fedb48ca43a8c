// SPDX-License-Identifier: Apache-2.0
// A pipeline whose devices are ranks, on one machine or several: rank i has stage i % p of replica i / p. Activations
// travel as messages. A rank has parameters, gradients and optimizer state of its own stage only, from the start
// (model/partial_model.h): model() has meta tensors in place of the others, and checkpoints are gathered tensor by
// tensor (train/state/snapshot.h).
//
// Owns:    this rank's part of the model
// Threads: one
// Ranks:   per micro-batch a rank sends its activations forward and their gradients back; per step 2(d-1)/d K of its
//          stage's parameters over d replicas; in synchronise() its stage's buffers
#include <algorithm>
#include <map>

#include "lockstep/base/process/stop.h"
#include "lockstep/base/require.h"
#include "lockstep/base/sockets/received.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/calls/tensor_call.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/strategy/pipeline/pipeline.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

constexpr int kMoveTag = 2;  // besides those of message_links()

// A rank without a gradient, where others have one, adds zeros.
void sum_gradients_over(const World& world, const NamedTensors& parameters) {
  if (world.size() == 1 || parameters.empty()) return;
  std::vector<int64_t> has_gradient;
  for (const auto& [name, parameter] : parameters) has_gradient.push_back(parameter.grad().defined() ? 1 : 0);
  const Tensor ranks_with_gradient = torch::tensor(has_gradient, torch::kInt64);
  world.all_reduce(ranks_with_gradient);
  const auto* with_gradient = ranks_with_gradient.const_data_ptr<int64_t>();
  for (auto [name, parameter] : parameters)
    if (*with_gradient++ > 0) world.all_reduce(dense_gradient(parameter));
}

class RankPipeline : public Pipeline {
 public:
  RankPipeline(const World& world, const Task& task, const StrategyOptions& options)
      : Pipeline(world, task, options), of_replica_(world), back_(world) {
    require(options.devices == 1, concat("a pipeline of ranks with ", options.devices, " devices each"),
            "give --devices-per-worker 1, or one rank with all devices");
    require(options.clipping.max_norm == 0,
            "clipping by norm with stages that are processes: each has the norm of its own gradients only",
            "leave out --devices-per-worker, so that stages are threads, or clip by value");
    const ModulePtr own = make_own_part();
    const int replica = world.rank() / stages_;
    of_stage_ = *world.split(stage());
    of_replica_ = *world.split(replica);
    back_ = world.device().is_cpu() ? of_replica_ : *world.split(replica);
    for (const auto& [name, tensor] : held(named_tensors(*own))) put_data(tensor, tensor.to(world.device()));
    const Layout layout = options_.layout.value_or(preferred_layout(*own, world.device()));
    set_layout(*own, layout);
    replicas_ = {{.model = own, .layout = layout, .optimizer = nullptr}};
    pieces_ = pieces_of(task_, *own);
    require_same_model(world, named_tensors(*own));
    hold_tensors({});
    for (const Group& group : groups_) broadcast_tensors(group.world, group.parameters);
    synchronise();
    seed_steps(options.seed);
  }

  void update() override {
    in_phase(Phase::kUpdate, [&] { optimizer().step(); });
  }

  // Gives the replicas of a stage the first one's buffers: running statistics are of the samples that a replica has
  // seen.
  void synchronise() override { broadcast_tensors(of_stage_, buffers_); }

  // All ranks of a replica call it with the same batch. The last stage returns the output.
  Tensor forward(const Batch& batch) override {
    const StageLinks links = message_links(of_replica_, back_);
    const auto pieces = own_pieces();
    Tensors outputs;
    for (const Batch& part : in_micro_batches(batch)) {
      const Tensors tensors = through(pieces, links.before ? links.before->receive() : inputs_of(part));
      links.behind ? links.behind->send(tensors) : outputs.push_back(tensors.at(0));
    }
    if (links.behind) links.behind->finish();
    return outputs.empty() ? Tensor() : torch::cat(outputs);
  }

 protected:
  // The stages of the first replica measure their pieces one after the other.
  std::vector<double> seconds_of_pieces(const Batch& first) override {
    const Tensor seconds = torch::zeros({std::ssize(pieces_)}, torch::kFloat64);
    if (of_stage_.rank() == 0) {
      const StageLinks links = message_links(of_replica_, back_);
      Tensors tensors = links.before ? links.before->receive() : inputs_of(first);
      const auto own = measure_pieces(own_pieces(), model(), tensors);
      seconds.slice(0, cut_[stage()].begin, cut_[stage()].end).copy_(torch::tensor(own, torch::kFloat64));
      if (links.behind) {
        links.behind->send(tensors);
        links.behind->finish();
      }
    }
    all_.all_reduce(seconds);
    return numbers_in<double>(seconds);
  }

  // Tensor by tensor, each from the first stage that has it to those that get it. All ranks go through the tensors in
  // the same order, and through the stages that get one; so each message is received before its sender goes on, and no
  // rank has more than one tensor twice.
  void move_to(const Cut& cut) override {
    const torch::NoGradGuard no_grad;
    const StagedTensors before = staged(cut_), after = staged(cut);
    OptimizerStates states;
    for (size_t i = 0; i < before.size(); ++i) {
      const Tensor& tensor = before[i].named.tensor;
      if (before[i].is_used_by(stage()) && after[i].is_used_by(stage()))
        for (const auto& [name, value] : state_of(before[i]))
          states[tensor.unsafeGetTensorImpl()][name] = value.clone();
      for (const int other : after[i].stages) {
        if (before[i].is_used_by(other)) continue;
        if (before[i].stages.front() == stage()) send(before[i], other);
        if (other == stage()) states[tensor.unsafeGetTensorImpl()] = receive(before[i]);
      }
    }
    for (const StagedTensor& each : after)
      if (!each.is_used_by(stage()) && is_held(each.named.tensor))
        put_data(each.named.tensor, on_meta(each.named.tensor));
    cut_ = cut;
    hold_tensors(states);
  }

  void begin_step() override { model().zero_grad(); }

  IntVector<StageResult> run_stages(const Batch& batch, const IntVector<IntVector<int64_t>>& counts,
                                    int64_t samples) override {
    StageWork work = work_of(of_stage_.rank(), stage(), batch, counts[0], samples);
    work.pieces = own_pieces();
    work.device = all_.device();
    const ThreadGenerator generator(work.seed);
    const StageResult result = run_stage(task_, work, message_links(of_replica_, back_));
    wait_for_device(all_.device(), options_.timeout);  // times are those of the work
    return {result};
  }

  // One all_reduce per parameter.
  void exchange(BatchTotals& totals) override {
    for (const Group& group : groups_) sum_gradients_over(group.world, group.parameters);
    const Tensor sums = torch::tensor({totals.mean_loss, wants_to_stop() ? 1.0 : 0.0}, torch::kFloat64);
    all_.all_reduce(sums);
    totals.mean_loss = sums[0].item<double>();
    if (sums[1].item<double>() > 0) agree_to_stop();
  }

 private:
  struct Group {
    World world;
    NamedTensors parameters;
  };

  int stage() const { return all_.rank() % stages_; }
  std::vector<Piece> own_pieces() const { return pieces_in(pieces_, cut_[stage()]); }
  StagedTensors staged(const Cut& cut) { return stage_tensors(model(), pieces_, cut); }

  ModulePtr make_own_part() {
    const auto generator = hold_generator();
    const PartialModel partial(task_.make_model);
    const auto pieces = pieces_of(task_, partial.skeleton());
    read_stages(all_.size(), pieces);
    return partial.make_part(options_.seed, [&](torch::nn::Module& skeleton) {
      Tensors own;
      for (const StagedTensor& each : stage_tensors(skeleton, pieces, cut_))
        if (each.is_used_by(stage())) own.push_back(each.named.tensor);
      return own;
    });
  }

  // Makes what a rank has beside its tensors: groups of ranks that use the same parameters, and an optimizer.
  void hold_tensors(const OptimizerStates& states) {
    groups_ = {{.world = of_stage_, .parameters = {}}};
    buffers_.clear();
    std::map<std::vector<int>, NamedTensors> shared;  // the same on every rank
    for (const StagedTensor& each : staged(cut_)) {
      if (each.is_buffer && each.is_used_by(stage())) buffers_.push_back(each.named);
      if (each.is_buffer) continue;
      if (each.stages.size() > 1) shared[each.stages].push_back(each.named);
      if (each.stages == std::vector{stage()}) groups_.front().parameters.push_back(each.named);
    }
    for (const auto& [stages, parameters] : shared) {
      const bool mine = std::ranges::find(stages, stage()) != stages.end();
      if (const auto world = all_.split(mine ? 0 : -1)) groups_.push_back({.world = *world, .parameters = parameters});
    }
    renew_optimizer(states);
  }

  Optimizer::StateTensors state_of(const StagedTensor& each) {
    const bool is_trained = !each.is_buffer && each.named.tensor.requires_grad();
    return is_trained ? optimizer().state_of(each.named.tensor) : Optimizer::StateTensors{};
  }

  void send(const StagedTensor& each, int to) {
    Tensors message = message_of(state_of(each));
    message.insert(message.begin(), each.named.tensor);
    TensorSender sender(of_replica_, to, kMoveTag);
    sender.send(message);
    sender.finish();
  }

  // Returns the optimizer's state.
  Optimizer::StateTensors receive(const StagedTensor& each) {
    const int from = each.stages.front();
    const Tensor& tensor = each.named.tensor;
    Tensors message = receive_tensors(of_replica_, from, kMoveTag);
    Received(concat("stage ", from))
        .require(!message.empty() && message.front().defined() && message.front().sizes() == tensor.sizes(),
                 concat("it is not the tensor ", each.named.name));
    put_data(tensor, torch::empty_like(tensor, tensor.options().device(all_.device())).copy_(message.front()));
    message.erase(message.begin());
    return state_in(message);
  }

  World of_replica_;  // the stages of this rank's replica: stage s is its rank s
  World back_;        // the same for gradients: between GPUs a message holds up those behind it on its connection
  std::vector<Piece> pieces_;
  std::vector<Group> groups_;  // this stage's replicas, then ranks of several stages
  NamedTensors buffers_;
};

}  // namespace

std::unique_ptr<Strategy> make_rank_pipeline(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<RankPipeline>(world, task, options);
}

}  // namespace lockstep
