// SPDX-License-Identifier: Apache-2.0
// train/loop.h: the training loop. It knows no strategy by name.
//
// Flow:    lockstep/loader.h -> Strategy::forward_backward -> finite? -> learning rate -> Strategy::update -> metrics,
//          checkpoints
// Owns:    the loader, the position in the run, and what is kept of it (train/state/state_keeper.h); the strategy is the caller's
// Threads: one thread
// Ranks:   every rank runs it; rank 0 writes and shows
#pragma once

#include <cstdint>

#include "lockstep/evaluate.h"
#include "lockstep/loader.h"
#include "lockstep/strategy.h"
#include "lockstep/task.h"
#include "lockstep/timeline.h"
#include "lockstep/train/options/options.h"
#include "lockstep/train/reports/metrics.h"
#include "lockstep/train/reports/progress.h"
#include "lockstep/train/state/state_keeper.h"
#include "lockstep/world.h"

namespace lockstep {

class TrainingLoop {
 public:
  // After the loss of a rank, goes on from what the ranks have kept in memory (train/state/loop_state.h). Else resumes from the
  // checkpoint folder if options.resume; without that the folder must have no checkpoints yet. Throws UsageError,
  // CheckpointError.
  TrainingLoop(const World& world, const Task& task, const Datasets& datasets, Strategy& strategy,
               const TrainOptions& options);

  // Trains to the end of the last epoch, or to --max-steps; or until the job is asked to stop (lockstep/stop.h): then all
  // ranks leave after the same step, with a checkpoint. Blocks. Returns what the last line of the metrics says.
  // Throws NonFiniteError (loss or parameters: names step and parameter; the last good checkpoint stays), PeerLost,
  // SystemError (on rank 0 after the last step: its checkpoint could not be written, or events of the metrics).
  Json run();

  bool stopped() const { return stopped_; }  // before the end, because it was asked to

 private:
  bool has_more() const;
  bool has_patience() const;
  void train_epoch();
  bool ends_here();
  void train_step(const Batch& batch, const Stopwatch& since_last_step);
  void require_finite_loss(const BatchTotals& totals) const;
  double learning_rate(int64_t step) const;
  Json step_event(const BatchTotals& totals, double seconds) const;
  Position after_step(const BatchTotals& totals, double seconds) const;
  void record_step(const BatchTotals& totals, const Json& event);
  void hint_at_loading(const LoadingStatistics& before, double seconds);
  void finish_epoch();
  Json epoch_event(const Evaluation& found) const;
  int64_t last_step() const;

  Json summary(double seconds) const;
  Json leave_early(double seconds, bool saved);

  World world_;
  World step_world_;  // the ranks that take each step at the same time
  Task task_;
  DatasetPtr validation_;
  Strategy& strategy_;
  TrainOptions options_;
  Loader loader_;
  Timeline timeline_;
  Position position_;
  MetricsFile metrics_;
  StateKeeper keeper_;
  Progress progress_;
  Json last_epoch_;  // the event in the metrics
  bool stopped_ = false;
  bool hinted_ = false;  // that steps wait for data
};

}  // namespace lockstep
