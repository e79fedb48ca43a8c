// SPDX-License-Identifier: Apache-2.0
// train/state/state_keeper.h: keeps the state of a run for those who go on with it: checkpoints in a folder; and, where a launcher
// replaces lost ranks, its memory.
//
// Flow:    strategy/ + Position -> checkpoint/, train/state/loop_state.h -> begin() of a later run
// Owns:    the checkpoint folder (rank 0), the images in the launcher's memory
// Threads: one thread
// Ranks:   the ranks of step_world call together
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "lockstep/checkpoint/checkpoint_writer.h"
#include "lockstep/strategy.h"
#include "lockstep/task.h"
#include "lockstep/train/options/options.h"
#include "lockstep/train/reports/metrics.h"
#include "lockstep/train/reports/progress.h"
#include "lockstep/train/state/loop_state.h"
#include "lockstep/world.h"

namespace lockstep {

// Tells whether this rank validates and saves. Where each rank steps at its own pace (asynchronous servers), rank 0 does so for all.
bool takes_part(const World& step_world, const World& world);

class StateKeeper {
 public:
  // Opens the checkpoint folder. Throws CheckpointError: it holds another run's, and options.resume is not set. All arguments
  // outlive this.
  StateKeeper(const World& world, const World& step_world, Strategy& strategy, const TrainOptions& options,
              MetricsFile& metrics, std::function<void(const CheckpointEvent&)> on_checkpoint);

  // Puts the state back that the ranks have kept in memory, after a loss; else with options.resume the newest checkpoint.
  // Returns where the run goes on, and begins to keep. Blocks. Throws UsageError, CheckpointError.
  Position begin();

  // Before the update after which `next` holds, and after it. event: the metrics of the step.
  void before_update(const Position& next, const Json& event);
  void after_update(const Position& now, const Json& event);

  void save(const Position& now);  // a checkpoint, with a folder for it. Blocks for a copy

  // Saves the last step, if it is not saved. Returns whether it is on the disk, which all ranks wait for.
  bool save_last(const Position& now);
  void require_saved(const Position& now, bool saved) const;  // throws SystemError on the rank that could not save

 private:
  bool saves() const;
  bool is_saved(const Position& now);
  void record_saved();
  void report_saved();
  std::optional<Position> restore_from_memory();
  std::optional<Position> restore_checkpoint();
  void keep(const Position& position, const std::string& last_event);

  World world_;
  World step_world_;
  Strategy& strategy_;
  const TrainOptions& options_;
  MetricsFile& metrics_;
  std::function<void(const CheckpointEvent&)> on_checkpoint_;
  std::optional<CheckpointWriter> checkpoints_;  // rank 0, with --checkpoint-dir
  std::optional<LoopState> kept_;                // in the launcher's memory
  std::string last_event_;                       // of the last step before a loss
  int64_t resumed_step_ = -1;                    // of the checkpoint
  int64_t awaited_ = -1;          // with on_checkpoint: the newest checkpoint, until all ranks know that it is saved
  Json written_ = Json::array();  // on rank 0: [step, path] of those that they do not know yet
};

}  // namespace lockstep
