// SPDX-License-Identifier: Apache-2.0
// train/loop.h: the training loop. It knows no strategy by name.
//
// Flow:    lockstep/loader.h -> Strategy::forward_backward -> finite? -> learning rate -> Strategy::update -> metrics,
//          checkpoints
// Owns:    the loader and the position in the run; the strategy is the caller's
// Threads: one thread
// Ranks:   every rank runs it; rank 0 writes and shows
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/checkpoint/checkpoint_writer.h"
#include "lockstep/loader.h"
#include "lockstep/strategy.h"
#include "lockstep/task.h"
#include "lockstep/timeline.h"
#include "lockstep/train/curves.h"
#include "lockstep/train/loop_state.h"
#include "lockstep/train/metrics.h"
#include "lockstep/train/options.h"
#include "lockstep/train/progress.h"
#include "lockstep/world.h"

namespace lockstep {

class InPlaceState;

class TrainingLoop {
 public:
  // After the loss of a rank, goes on from what the ranks have kept in memory (train/loop_state.h). Else resumes from the
  // checkpoint folder if options.resume; without that the folder must have no checkpoints yet. Throws UsageError,
  // CheckpointError.
  TrainingLoop(const World& world, const Task& task, const Datasets& datasets, Strategy& strategy,
               const TrainOptions& options);
  ~TrainingLoop();

  // Trains to the end of the last epoch, or to --max-steps; or until the job is asked to stop (lockstep/stop.h): then all
  // ranks leave after the same step, with a checkpoint. Blocks. Returns what the last line of the metrics says.
  // Throws NonFiniteError (loss or parameters: names step and parameter; the last good checkpoint stays), PeerLost,
  // SystemError (on rank 0 after the last step: its checkpoint could not be written, or events of the metrics).
  Json run();

  bool stopped() const { return stopped_; }  // before the end, because it was asked to

 private:
  bool has_more() const;
  void train_epoch();
  bool ends_here();
  void train_step(const Batch& batch, const Stopwatch& since_last_step);
  void require_finite_loss(const BatchTotals& totals) const;
  double learning_rate() const;
  Json step_event(const BatchTotals& totals, double seconds) const;
  Position after_step(const BatchTotals& totals, double seconds) const;
  void record_step(const BatchTotals& totals, double seconds);
  void hint_at_loading(const LoadingStatistics& before, double seconds);
  void finish_epoch();
  std::int64_t last_step() const;

  void open_checkpoints();
  void keep_state();
  void keep_own_state(const BatchTotals& totals, double seconds);
  void save_checkpoint();
  void make_room_to_save();
  void record_saved();
  bool is_saved();
  bool save_last_checkpoint();
  void require_saved(bool saved) const;
  void require_recorded();
  void resume();
  void require_checkpoint() const;
  bool go_on_from_memory();
  void begin_to_keep();
  Json summary(double seconds) const;
  Json leave_early(double seconds, bool saved);

  bool stands_aside() const;
  std::int64_t ranks() const;

  World world_;
  World step_world_;  // the ranks that take each step at the same time
  Task task_;
  std::shared_ptr<const Dataset> validation_;
  Strategy& strategy_;
  TrainOptions options_;
  Loader loader_;
  Timeline timeline_;
  Position position_;
  std::optional<CheckpointWriter> checkpoints_;  // rank 0, with --checkpoint-dir
  std::unique_ptr<InPlaceState> in_place_;       // where a launcher replaces lost ranks, and the state lies in its memory
  std::optional<LoopState> kept_;                // where it does not lie there
  std::string last_event_;                       // of a step, for those who go on after a loss
  MetricsFile metrics_;
  Curves curves_;
  Progress progress_;
  Json last_epoch_;  // the event in the metrics
  bool stopped_ = false;
  bool hinted_ = false;             // that steps wait for data
  std::int64_t resumed_step_ = -1;  // of the checkpoint
  bool has_room_to_save_ = false;
};

}  // namespace lockstep
