// SPDX-License-Identifier: Apache-2.0
// train/state/in_place_state.h: the state of a run whose parameters and optimizer state are never copied, because they lie in memory
// that the launcher holds (docs/design/recovery.md, "The update"). Only what each rank has for itself is copied: random
// generators, buffers, the position in the run.
//
// Flow:    strategy/ + Position -> publish(), before each update -> memory of the launcher -> take_over(), in the next generation
// Owns:    two images of what this rank has for itself (train/state/double_buffer.h), written in turn
// Threads: one thread
// Ranks:   all calls are collective, except publish(). All ranks are on one machine
//
// Every rank publishes its state after step s before any rank's update of step s can begin (barrier 2 of the update). The update
// says whether it had begun: then it is finished and the images of s hold; else those of s-1, which are still there.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "agent/recover/job_memory.h"
#include "lockstep/strategy.h"
#include "lockstep/train/options/options.h"
#include "lockstep/train/state/double_buffer.h"
#include "lockstep/train/state/loop_state.h"
#include "lockstep/train/state/snapshot.h"
#include "lockstep/world.h"

namespace lockstep {

class InPlaceState {
 public:
  // Null, on all ranks: parameters and optimizer state are not in such memory. Blocks. Throws SystemError.
  static std::unique_ptr<InPlaceState> of(JobMemory& memory, const World& world, Strategy& strategy,
                                          const TrainOptions& options);

  // Takes over what the last generation has left, if all ranks find it: parameters, the optimizer's state, this rank's own.
  // last_step: becomes what publish() was given; "": nothing. Blocks. Throws as restore_snapshot() does.
  std::optional<Position> take_over(std::string& last_step);

  // This rank has its state: the launcher may forget what is older once all ranks have. Blocks.
  void begin(const Position& position, const std::string& last_step);

  // Before the update after which `position` holds. last_step: a text about it, for those who go on.
  void publish(const Position& position, const std::string& last_step);

 private:
  InPlaceState(JobMemory& memory, const World& world, Strategy& strategy, const TrainOptions& options);

  JobMemory& memory_;
  World world_;
  Strategy& strategy_;
  TrainOptions options_;
  DoubleBuffer own_;
  std::int64_t updates_ = 0;  // of this generation, the one that comes next included
};

}  // namespace lockstep
