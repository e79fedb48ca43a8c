// SPDX-License-Identifier: Apache-2.0
// `towers`: data parallel training out of the calls of lockstep/towers.h.
//
//   update on every device   a copy of the parameters and an optimizer per device, as in "Dive into Deep Learning"
//   update on the CPU        one set of parameters and one optimizer; gradients are summed in the pass that updates, as in
//                            TensorFlow's multi-tower CIFAR-10 example. Where devices are GPUs this is
//                            kvstore local_update_cpu: gradients and parameters go over pinned memory
//
// Owns:    the devices' threads, a replica per device
// Threads: one scheduling thread
// Ranks:   inside one process
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/kvstore/kvstore_strategy.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

class Towers : public ReplicaStrategy {
 public:
  Towers(const World& world, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(world, task, options), algorithm_(options.algorithm) {
    if (options.towers.update == UpdateOn::kCpu) share_parameters(*devices_, replicas_);
    seed_steps(options.seed);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    const BatchTotals totals = train_towers(batch);
    in_phase(Phase::kExchange, [&] {
      if (update_on_cpu())
        combine_gradients(replicas_);
      else
        all_reduce_gradients(*devices_, replicas_, algorithm_);
    });
    return totals;
  }

  void update() override {
    if (!update_on_cpu()) return update_replicas();
    in_phase(Phase::kUpdate, [&] { optimizer().step(); });
  }

  void restored(std::int64_t) override { update_on_cpu() ? follow_model(replicas_) : follow_first(replicas_); }

 private:
  bool update_on_cpu() const { return replicas_.front().combined != nullptr; }

  Algorithm algorithm_;
};

}  // namespace

HeldBytes bytes_of_towers(const PlannedRun& run) {
  return run.options.towers.update == UpdateOn::kCpu ? bytes_of_data_parallel(run) : bytes_of_averaging(run);
}

std::unique_ptr<Strategy> make_towers(const World& world, const Task& task, const StrategyOptions& options) {
  require_one_process(world, options);
  if (options.towers.update == UpdateOn::kCpu && !devices_of(options).front().is_cpu()) {
    StrategyOptions in_store = options;  // the same by another name: a store in the host's memory
    in_store.kvstore = {.kind = KVStoreKind::kLocalUpdateCpu};
    return make_kvstore_strategy(world, task, in_store);
  }
  return std::make_unique<Towers>(world, task, options);
}

}  // namespace lockstep
