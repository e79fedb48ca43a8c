// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/pipeline.h: `pipeline`: consecutive pieces of the model on different devices (model parallelism), as
// docs/strategies/pipeline.md says.
//
// Losses of micro-batches are weighted by samples: the gradient is that of the whole batch. Of p stages device i has stage
// i % p of replica i / p. Devices are threads of one process (local_pipeline.cc) or ranks (rank_pipeline.cc).
//
// Flow:    the part of a batch that ranks().data says -> micro-batches -> strategy/pipeline/stage.h -> step/update/
// Threads: one scheduling thread
// Ranks:   every rank makes the same calls
#pragma once

#include <map>
#include <vector>

#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/pipeline/stage.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {

using OptimizerStates = std::map<const void*, Optimizer::StateTensors>;  // TensorImpl -> state

class Pipeline : public ReplicaStrategy {
 public:
  BatchTotals forward_backward(const Batch& batch) override;
  void restored(int64_t step) override { step_ = step; }
  Report report() const override;
  StrategyRanks ranks(const World& world) const override {
    return {.data = of_stage_, .validation = of_stage_, .step = world};
  }

 protected:
  Pipeline(const World& all, const Task& task, const StrategyOptions& options);

  // Reads --stages, for as many devices as all ranks have. Without a cut, the stages have about as many bytes of
  // parameters each until they have been measured.
  void read_stages(int devices, const std::vector<Piece>& pieces);

  // Seconds of each piece. first: the first micro-batch.
  virtual std::vector<double> seconds_of_pieces(const Batch& first) = 0;
  // Gives the stages their tensors of another cut, with the optimizer's state.
  virtual void move_to(const Cut& cut) = 0;
  virtual void begin_step() = 0;
  // Runs every stage of this process, all at the same time. counts: [replica of this process][micro-batch], by
  // Task::samples of the undivided batch: a part's tensors are on two devices. samples: of all replicas.
  virtual IntVector<StageResult> run_stages(const Batch& batch, const IntVector<IntVector<int64_t>>& counts,
                                            int64_t samples) = 0;
  // Sums gradients over all stages and replicas that use a parameter, and losses over the ranks.
  virtual void exchange(BatchTotals& totals) = 0;

  // The caller adds pieces and device. part, counts: of the replica. Leaves out micro-batches that count 0.
  StageWork work_of(int replica, int stage, const Batch& part, IntVector<int64_t> counts, int64_t samples) const;

  // Makes a new optimizer of the parameters that this process holds. gradients: where it gets them; null: .grad
  void renew_optimizer(const OptimizerStates& states, const std::shared_ptr<GradientSource>& gradients = nullptr);

  // Cuts a batch of validation into parts as small as micro-batches.
  IntVector<Batch> in_micro_batches(const Batch& batch) const;

  StrategyOptions options_;
  World all_;
  World of_stage_;  // the replicas of this rank's stage
  int stages_ = 0;
  int replica_count_ = 0;  // of all ranks
  int64_t micro_batches_;
  Cut cut_;

 private:
  enum Usage { kBusy, kWall, kInFlight, kBytes, kUsages };  // of a device: seconds, and the most so far

  void set_layouts(IntVector<Batch>& batches) const;
  void use_measured_cut(const Batch& batch);
  void record(const IntVector<StageResult>& results, double seconds);

  bool cut_is_final_ = false;  // named, or the first batch has been measured
  int64_t step_ = 0;           // of the next batch: its random numbers depend on it
  Tensor usage_;               // [device of this process][Usage]
};

MakeStrategy make_local_pipeline, make_rank_pipeline;

}  // namespace lockstep
