// SPDX-License-Identifier: Apache-2.0
// strategy/devices/replica_strategy.h: what strategies with replicas in this process have in common: the task, the
// devices, the replicas and where a step's time goes. Validation, checkpoints and schedules see the first replica.
//
// Owns:    the devices' threads, if there are any, and the replicas
// Threads: one scheduling thread
// Ranks:   as the strategy says
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/base/process/stop.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/deadline.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {

inline std::unique_ptr<Devices> make_devices(const World& world, const StrategyOptions& options) {
  const bool on_gpus = !options.places.empty() && !options.places.front().device.is_cpu();
  return std::make_unique<Devices>(
      DevicesOptions{.count = options.devices,
                     .cores = world.cores(),
                     .timeout = world.size() > 1 && on_gpus ? own_share(options.timeout) : options.timeout,
                     .places = options.places});
}

class ReplicaStrategy : public Strategy {
 public:
  Tensor forward(const Batch& batch) override { return replicas_.front().forward(task_, batch); }
  torch::nn::Module& model() override { return *replicas_.front().model; }
  Optimizer& optimizer() override { return *replicas_.front().optimizer; }
  const PhaseTimes& phases() const override { return phases_; }
  const Devices* devices() const override { return devices_.get(); }
  void prefetch(const Batch& next) override { ahead_.push_back({next, start_copies(next)}); }

 protected:
  ReplicaStrategy(Task task, Replicas replicas) : task_(std::move(task)), replicas_(std::move(replicas)) {}

  // Makes the devices, with a replica on each.
  ReplicaStrategy(const World& world, const Task& task, const StrategyOptions& options)
      : task_(task),
        devices_(make_devices(world, options)),
        replicas_(get_params(*devices_, task, options)),
        accumulate_(options.accumulate),
        uneven_(options.towers.refuse_uneven ? Uneven::kRefuse : Uneven::kSplit) {}

  // The batch's parts, each on its device. What prefetch() has begun to bring is taken from there; what it brought for
  // a step before is dropped.
  std::vector<Batch> parts_for_devices(const Batch& batch) {
    constexpr size_t kAhead = 2;  // this batch and the next: what is older was never asked for
    while (ahead_.size() > kAhead) ahead_.pop_front();
    const auto found =
        std::ranges::find_if(ahead_, [&](const Ahead& each) { return each.batch.data.is_same(batch.data); });
    if (found == ahead_.end()) return receive_parts(start_copies(batch));
    auto parts = std::move(found->parts);
    ahead_.erase(ahead_.begin(), std::next(found));
    return receive_parts(std::move(parts));
  }

  // Begins to bring what the devices need of a batch.
  virtual std::vector<CopiedBatch> start_copies(const Batch& batch) const { return start_parts(*devices_, batch); }

  auto in_phase(Phase phase, const auto& work) {
    const PhaseScope scope(phase, seconds_in(phase));
    return work();
  }

  // Forward and backward on every device, as tower_losses() and backward() do them. Returns the totals.
  BatchTotals train_towers(const Batch& batch) {
    require_even(batch.size(), *devices_, uneven_);
    const int64_t samples = samples_of(task_, batch);
    const auto shards = parts_for_devices(batch);
    Tensors losses;
    std::vector<Batch> parts;
    for (int i = 0; i < accumulate_; ++i) {
      std::vector<Batch> now;
      for (const Batch& shard : shards) now.push_back(part_of(shard, i, accumulate_));
      const auto found =
          in_phase(Phase::kForward, [&] { return tower_losses(*devices_, task_, replicas_, now, i == 0); });
      in_phase(Phase::kBackward, [&] { backward(*devices_, task_, found, now, samples); });
      losses.insert(losses.end(), found.begin(), found.end());
      parts.insert(parts.end(), now.begin(), now.end());
    }
    return mean_of(losses, parts, task_);
  }

  // Every device updates its own replica. Schedules change the learning rate of the first one alone.
  void update_replicas() {
    in_phase(Phase::kUpdate, [this] {
      for (const Replica& replica : replicas_) set_learning_rate(*replica.optimizer, learning_rate());
      lockstep::update(*devices_, replicas_);
    });
  }

  double learning_rate() { return optimizer().param_groups().front().options().get_lr(); }

  Task task_;
  std::unique_ptr<Devices> devices_;  // none: the replica trains on the calling thread
  Replicas replicas_;                 // never empty
  int accumulate_ = 1;                // parts of each device's batch
  PhaseTimes phases_;

 private:
  double& seconds_in(Phase phase) {
    switch (phase) {
      case Phase::kForward: return phases_.forward;
      case Phase::kBackward: return phases_.backward;
      case Phase::kExchange: return phases_.exchange;
      default: return phases_.update;
    }
  }

  struct Ahead {
    Batch batch;
    std::vector<CopiedBatch> parts;
  };
  std::deque<Ahead> ahead_;  // batches of the steps to come
  Uneven uneven_ = Uneven::kSplit;
};

// The sum over all ranks of `world`.
template <class Number>
Number sum_over(const World& world, Number number) {
  const Tensor sum = torch::full({1}, number, c10::CppTypeToScalarType<Number>::value);
  world.all_reduce(sum);
  return sum.item<Number>();
}

// The same of examples, asked for only where `task` counts samples that are not examples.
inline int64_t sum_examples(const World& world, const Task& task, const Batch& batch, int64_t samples) {
  return task.samples ? sum_over(world, batch.size()) : samples;
}

// Totals of a batch over all ranks of `world`, in one all-reduce; more: further numbers, which become their sums. All
// ranks agree to stop if one was asked to.
inline BatchTotals sum_totals(const World& world, const BatchTotals& own, std::vector<double>* more = nullptr) {
  const auto samples = to_double(own.samples);
  std::vector<double> values{samples, own.mean_loss * samples, wants_to_stop() ? 1.0 : 0.0, to_double(own.examples)};
  if (more != nullptr) values.insert(values.end(), more->begin(), more->end());
  const Tensor sums = torch::tensor(values, torch::kFloat64);
  world.all_reduce(sums);
  const auto* sum = sums.const_data_ptr<double>();
  if (sum[2] > 0) agree_to_stop();
  if (more != nullptr) std::copy_n(sum + 4, more->size(), more->begin());
  return {.samples = static_cast<int64_t>(sum[0]),
          .mean_loss = sum[0] > 0 ? sum[1] / sum[0] : 0,
          .examples = static_cast<int64_t>(sum[3])};
}

}  // namespace lockstep
