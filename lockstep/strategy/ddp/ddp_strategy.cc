// SPDX-License-Identifier: Apache-2.0
// `ddp` and `single`: a replica of the model in every rank, kept equal by DistributedDataParallel (lockstep/ddp.h).
#include <algorithm>
#include <optional>

#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/ddp.h"
#include "lockstep/error.h"
#include "lockstep/gradient_scaler.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"
#include "lockstep/strategy/strategies.h"
#include "lockstep/sync_batch_norm.h"

namespace lockstep {
namespace {

// `single` and `ddp`: a replica in every rank. In a world of one there is nothing to exchange, and it is `single`.
class DdpStrategy : public ReplicaStrategy {
 public:
  DdpStrategy(const World& world, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(task, {make_replica(task, options, world.device())}),
        world_(world),
        options_(options),
        hook_(make_hook(options.compression)),
        ddp_(world, model(), optimizer(),
             {.bucket_bytes = static_cast<size_t>(options.ddp.bucket_mib) << 20,
              .share_parameters = options.ddp.share_parameters,
              .slice_update = options.ddp.share_parameters,
              .hook = hook_,
              .algorithm = options.algorithm,
              .virtual_shards = options.ddp.virtual_shards}) {
    if (task.samples && world.size() > 1) refuse_sync_batch_norm();
    seed_steps(options.seed, world.rank());  // dropout differs between ranks
    if (options.precision != Precision::kFloat16) return;
    scaler_.emplace();
    optimizer().set_loss_scale(scaler_->current_scale());  // now, for its error
    scaler_state_ = bytes_of_text(scaler_->state());
  }

  BatchTotals forward_backward(const Batch& batch) override {
    optimizer().zero_grad();
    if (options_.ddp.virtual_shards > 0)
      compute_shards(batch);
    else
      compute_parts(batch);
    BatchTotals totals = ddp_.last_batch();
    totals.examples = sum_examples(world_, task_, batch, totals.samples);
    if (totals.samples == 0) totals.mean_loss = 0;  // of all ranks: the step changes nothing
    return totals;
  }

  void update() override {
    in_phase(Phase::kUpdate, [&] {
      if (!scaler_)
        optimizer().step();
      else
        scaler_->step(optimizer());
    });
    if (scaler_) scaler_state_.copy_(bytes_of_text(scaler_->state()));
    ++step_;
  }

  void restored(int64_t step) override {
    ddp_.parameters_written();
    step_ = step;
    if (scaler_) scaler_->set_state(text_in(scaler_state_));
  }

  NamedTensors state() override { return scaler_ ? NamedTensors{{"gradient_scaler", scaler_state_}} : NamedTensors(); }

  NamedTensors own_state() override { return hook_ ? hook_->state() : NamedTensors(); }
  void set_own_state(const NamedTensors& state) override {
    if (hook_) hook_->set_state(state);
  }

  Report report() const override {
    Report report;
    if (scaler_) report = {{"loss_scale", scaler_->current_scale()}};
    if (world_.size() == 1) return report;
    const auto statistics = ddp_.statistics();
    report.insert(report.end(), {{"exchanged_bytes", statistics.bytes}, {"exchange_overlap", statistics.overlap()}});
    return report;
  }

 private:
  // It weighs the ranks' gradients by rows, and waits for a rank that leaves a part out.
  void refuse_sync_batch_norm() {
    for (const auto& module : model().modules())
      if (dynamic_cast<const SyncBatchNormImpl*>(module.get()) != nullptr)
        throw UsageError({.what = concat("Task::samples of ", task_.name, ", whose model has a SyncBatchNorm"),
                          .next = "take another normalisation, such as GroupNorm, or leave one of the two out"});
  }

  struct Part {
    Batch batch;
    int64_t samples;
  };

  // Once: on a GPU it waits.
  Part counted(Batch batch) const {
    const int64_t samples = samples_of(task_, batch);
    return {std::move(batch), samples};
  }

  // This rank's shards one after another, each with random numbers that depend on nothing but seed, step and shard.
  void compute_shards(const Batch& batch) {
    const int64_t all = sum_over(world_, batch.size());
    const int shards = options_.ddp.virtual_shards / world_.size();
    const int64_t before_mine = even_part(all, world_.rank(), world_.size()).begin;
    for (int shard = world_.rank() * shards; shard < (world_.rank() + 1) * shards; ++shard) {
      const Range part = even_part(all, shard, options_.ddp.virtual_shards);
      const uint64_t seed = mix_seed(mix_seed(options_.seed, step_), shard);
      const ThreadGenerator generator(seed);  // no longer than that: between steps, torch::manual_seed() decides
      if (!world_.device().is_cpu()) seed_gpu(world_.device(), seed);
      forward_and_backward(counted(batch.rows(part.begin - before_mine, part.end - before_mine)));
    }
  }

  // First a part that counts: DistributedDataParallel counts backward() from the first with samples on. Then those that
  // don't: the last backward() exchanges, and has gradients to send.
  void compute_parts(const Batch& batch) {
    if (options_.accumulate == 1 || batch.size() == 0) return forward_and_backward(counted(batch));
    std::vector<Part> parts;
    for (Batch& part : parts_of(batch, options_.accumulate)) parts.push_back(counted(std::move(part)));
    std::ranges::reverse(parts);
    const auto nothing = std::ranges::stable_partition(parts, [](const Part& part) { return part.samples > 0; });
    if (nothing.begin() != parts.begin()) std::rotate(parts.begin() + 1, nothing.begin(), parts.end());
    {
      const auto only_add = ddp_.no_sync();
      for (size_t i = 0; i + 1 < parts.size(); ++i) forward_and_backward(parts[i]);
    }
    forward_and_backward(parts.back());
  }

  void forward_and_backward(const Part& part) {
    BatchWeight weight = part.samples;
    if (task_.samples) weight.size = to_double(part.batch.size());
    Tensor loss;
    if (part.samples > 0) {
      require_device(part.batch, world_.device());
      loss = in_phase(Phase::kForward, [&] { return task_.loss(forward(part.batch), part.batch); });
    }
    const double waited = phases_.exchange;
    const Stopwatch watch;
    ddp_.backward(loss, weight, (scaler_ ? scaler_->current_scale() : 1) / options_.accumulate);
    phases_.exchange = ddp_.statistics().waiting_seconds;
    phases_.backward += watch.seconds() - (phases_.exchange - waited);
  }

  World world_;
  StrategyOptions options_;
  std::shared_ptr<CommunicationHook> hook_;  // null: gradients are not compressed
  DistributedDataParallel ddp_;
  std::optional<GradientScaler> scaler_;  // with float16
  Tensor scaler_state_;                   // of which checkpoints keep this
  int64_t step_ = 0;
};

}  // namespace

// The ranks of a machine share parameters and state. Between machines each has buckets.
HeldBytes bytes_of_ddp(const PlannedRun& run) {
  HeldBytes bytes = bytes_of_data_parallel(run);
  bytes.processes *= run.devices;
  if (run.machines > 1) bytes.buckets = bytes.gradients;
  return bytes;
}

std::unique_ptr<Strategy> make_ddp(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<DdpStrategy>(world, task, options);
}

}  // namespace lockstep
