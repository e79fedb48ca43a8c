// SPDX-License-Identifier: Apache-2.0
// `averaging`: every device trains a replica of its own, and the parameters are averaged every h batches.
//
//   1 scheduling thread prepares a batch and hands each of N device threads its part
//   N device threads    forward, backward and update of their own replica, without exchange
//   every h batches     replica 0 = the mean of all replicas, weighted by the samples they saw; then copied to all
//
// With h = 1 and plain SGD this is data parallel training, step by step. Between processes and machines the averages
// are averaged once more, through World (local SGD: Stich, 2019): the bytes sent per batch fall by h. With an outer
// learning rate or momentum, the difference between the last average and the new one is a gradient for a step with
// Nesterov's momentum (DiLoCo: Douillard et al., 2023).
//
// Momentum belongs to each replica. synchronise() (before validation and checkpoints) averages at once, and the
// replicas of all ranks continue with the momentum and the buffers of rank 0's replica 0. A run that resumes from that
// checkpoint has the same bits as one that went on.
//
// Owns:    the devices' threads; per device a replica and one flat block of its parameters
// Threads: one scheduling thread
// Ranks:   every rank has its own devices; all ranks make the same calls. Sends 2(R-1)/R K every h batches over R ranks,
//          and 32 bytes for the loss of each batch
#include <algorithm>
#include <numeric>
#include <optional>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/averaging/flat_block.h"
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

void require_sensible(const AveragingOptions& options) {
  if (options.every < 1)
    throw UsageError({.what = concat("--average-every ", options.every), .next = "give at least 1 batch"});
  if (options.outer_lr <= 0 || options.outer_momentum < 0)
    throw UsageError({.what = concat("--outer-lr ", options.outer_lr, ", --outer-momentum ", options.outer_momentum),
                      .next = "give a positive rate and a momentum of at least 0"});
}

// DiLoCo's outer optimizer: takes a step of Nesterov's SGD towards the average.
class OuterStep {
 public:
  OuterStep(const torch::Tensor& block, const AveragingOptions& options)
      : anchor_(block.clone().requires_grad_()),
        sgd_({anchor_},
             {.lr = options.outer_lr, .momentum = options.outer_momentum, .nesterov = options.outer_momentum > 0}) {
    // Made now, so that a checkpoint can be restored into it.
    Optimizer::StateTensors state{{"step", torch::ones({})}};
    if (options.outer_momentum > 0) state["momentum_buffer"] = torch::zeros_like(block);
    sgd_.set_state(anchor_, state);
  }

  // Replaces the average by the result of the outer step. Its gradient is anchor - average, where the anchor is the
  // result of the last step.
  void apply(const torch::Tensor& average) {
    const torch::NoGradGuard no_grad;
    anchor_.mutable_grad() = anchor_.detach() - average;
    sgd_.step();
    average.copy_(anchor_);
  }

  void restart_from(const torch::Tensor& block) {
    const torch::NoGradGuard no_grad;
    anchor_.copy_(block);
  }

  NamedTensors state() const {
    NamedTensors tensors;
    for (const auto& [name, tensor] : sgd_.state_of(anchor_))
      if (tensor.defined()) tensors.push_back({"outer." + name, tensor});
    return tensors;
  }

 private:
  torch::Tensor anchor_;
  SGD sgd_;
};

class Averaging : public ReplicaStrategy {
 public:
  Averaging(const World& world, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(world, task, options),
        world_(world),
        average_every_(options.averaging.every),
        samples_(replicas_.size()) {
    require_sensible(options.averaging);
    require_same_model(world, named_parameters(model()));
    broadcast_model(world, model());
    for (const Replica& replica : replicas_)  // other processes read replica 0's block
      blocks_.push_back(make_flat_block(*replica.model, blocks_.empty() ? world_ : World::single()));
    follow_first(replicas_);
    if (options.averaging.outer_lr != 1 || options.averaging.outer_momentum > 0)
      outer_.emplace(blocks_.front(), options.averaging);
    seed_steps(options.seed, world.rank());
  }

  BatchTotals forward_backward(const Batch& batch) override {
    const auto parts = parts_for_devices(batch);
    const auto losses = in_phase(Phase::kBackward, [&] {
      return run_replicas(*devices_, replicas_, parts,
                          [task = task_, most = int64_t{accumulate_}](const Replica& replica, const Batch& mine) {
                            const int64_t samples = samples_of(task, mine);
                            if (samples == 0) return torch::Tensor();
                            torch::Tensor mean = torch::zeros({}, replica.device);
                            for (const Batch& part : parts_of(mine, to_int(std::min(most, mine.size())))) {
                              const double share = fraction(samples_of(task, part), samples);
                              if (share == 0) continue;
                              const torch::Tensor loss = task.loss(replica.forward(task, part), part) * share;
                              loss.backward();
                              mean = mean + loss.detach();
                            }
                            return mean;
                          });
    });
    for (size_t i = 0; i < parts.size(); ++i) samples_[i] += samples_of(task_, parts[i]);
    const BatchTotals mine = mean_of(losses, parts, task_);
    return world_.size() == 1 ? mine : sum_totals(world_, mine);
  }

  void update() override {
    update_replicas();
    is_one_model_ = false;
    if (++batches_since_average_ == average_every_) average();
  }

  void synchronise() override {
    is_one_model_ = true;
    if (batches_since_average_ > 0) average();
    if (world_.size() > 1) {
      broadcast_tensors(world_, named_buffers(model()));
      optimizer().broadcast_state(world_, 0);
    }
    follow_first(replicas_);
  }

  void restored(int64_t) override {
    is_one_model_ = true;
    follow_first(replicas_);
    if (outer_) outer_->restart_from(blocks_.front());
  }

  NamedTensors state() override { return outer_ ? outer_->state() : NamedTensors(); }

  Report report() const override {
    return {{"average_every", average_every_},
            {"averages", averages_},
            {"block_bytes", blocks_.front().nbytes()},
            {"exchanged_bytes",
             world_.size() > 1 ? static_cast<double>(averages_) * static_cast<double>(blocks_.front().nbytes()) : 0.0}};
  }

 private:
  // With N devices in each of R ranks and K bytes of parameters:
  //
  //   1  collect     each device scales its block by its share of all samples; then device d adds up part d of the N
  //                  blocks into block 0: it reads K and writes K/N
  //   2  all_reduce  block 0 over the ranks: each sends 2(R-1)/R K. It is the weighted mean of all R*N replicas now
  //   3  outer step  on every rank with the same numbers, and so with the same result
  //   4  copy back   each device copies block 0 into its own: K read, K written
  //
  // Steps 1 and 4 end with a wait for all devices (Devices::run). So replica 0 can't train on while others still copy
  // from its block.
  void average() {
    in_phase(Phase::kExchange, [&] {
      const int64_t all = sum_over(world_, std::accumulate(samples_.begin(), samples_.end(), int64_t{0}));
      batches_since_average_ = 0;
      if (all == 0) return;
      mean_onto_first(*devices_, blocks_, samples_, all);
      all_reduce_block_0();
      if (outer_) outer_->apply(blocks_.front());
      copy_from_first(*devices_, blocks_);
      std::ranges::fill(samples_, 0);
      ++averages_;
    });
  }

  // Ranks exchange blocks of GPUs over the host.
  void all_reduce_block_0() {
    const torch::Tensor& block = blocks_.front();
    if (world_.size() == 1) return;
    if (block.is_cpu()) return world_.all_reduce(block);
    if (!host_.defined()) host_ = world_.allocate({block.numel()}, block.scalar_type());
    on_device(block.device(), [&] { host_.copy_(block); });
    world_.all_reduce(host_);
    on_device(block.device(), [&] { block.copy_(host_, /*non_blocking=*/true); });
  }

  World world_;
  int64_t average_every_;
  Tensors blocks_;                  // of each replica's parameters
  torch::Tensor host_;              // of several ranks with GPUs: block 0 on its way
  std::vector<int64_t> samples_;    // that each replica has seen since the last average
  std::optional<OuterStep> outer_;  // none: the average is taken as it is
  int64_t batches_since_average_ = 0;
  int64_t averages_ = 0;
};

}  // namespace

// Every device has a replica of its own.
HeldBytes bytes_of_averaging(const PlannedRun& run) {
  HeldBytes bytes = bytes_of_data_parallel(run);
  bytes.parameters *= run.devices;
  bytes.state *= run.devices;
  return bytes;
}

std::unique_ptr<Strategy> make_averaging(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<Averaging>(world, task, options);
}

}  // namespace lockstep
