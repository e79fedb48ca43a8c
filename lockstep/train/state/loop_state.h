// SPDX-License-Identifier: Apache-2.0
// train/state/loop_state.h: the state of a training loop, kept in memory that the launcher holds; and the newest state of a job
// whose ranks were lost.
//
//   common   what all ranks have alike (parameters, the optimizer's state): the first rank of each machine keeps it
//   own      what each rank has for itself (random generators, its place in the data, buffers)
//
// Both are copied every few steps. In place: `common` already lies in such memory, and is never copied; `own` is, before each
// update (docs/design/recovery.md, "The update").
//
// Flow:    a loop's tensors -> keep() -> the launcher -> find() of the next World -> the loop's tensors
// Owns:    two images of each kind (train/state/double_buffer.h)
// Threads: one thread
// Ranks:   all calls are collective
//
// A copy of step s is whole when every rank of a machine has its image of s. A rank can't begin the copy after the next one
// while another still writes: each copy ends with an all-reduce. So there is always one step that is whole. In place every
// rank has kept its state after step s before any rank's update of step s can begin (barrier 2 of the update). The update
// says whether it had begun: then it is finished and the images of s hold; else those of s-1, which are still there.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/deadline.h"
#include "lockstep/optimizer.h"
#include "lockstep/train/state/double_buffer.h"
#include "lockstep/world.h"

namespace lockstep {

class LoopState {
 public:
  // Finds the newest state that a machine has whole, and gives it to ranks whose machine lacks it. Blocks.
  // share_of_time: that copies may take. in_parts: `own` has what no other rank may have, so the newest state is one that every
  // machine has whole. optimizer: one whose parameters and state may stay in place; it has taken them over afterwards. Throws
  // SystemError, CheckpointError.
  LoopState(const World& world, JobMemory& memory, double share_of_time, bool in_parts = false,
            Optimizer* optimizer = nullptr);

  bool in_place() const { return in_place_ != nullptr; }

  // The newest state that some machine has.
  struct Found {
    bool in_place = false;  // then `common` is taken over
    SafetensorsReader common;
    SafetensorsReader own;                  // of the rank that had this rank's number; else of the first rank
    bool is_own_rank = false;               // which of the two
    int ranks = 1;                          // of the World that kept it
    std::vector<SafetensorsReader> here{};  // the own states of all ranks that were on this machine
  };
  const Found* found() const { return found_ ? &*found_ : nullptr; }

  // Forgets what was found, as if there was nothing.
  void drop_found();

  // All ranks have taken what was found, the state after `step`, or begin anew: from now on it is this World's. False: it is not
  // kept, and the launcher has that of the World before until keep(). Blocks.
  bool taken(int64_t step);

  // After each step, in place before each update: whether to keep() now. The same on all ranks.
  bool is_due();

  // Tells whether this rank's `common` is wanted: else, and in place, it may be empty.
  bool keeps_common() const { return world_.local_rank() == 0; }

  // Blocks for the copy, then until all ranks have copied; in place only the first time, before the first step. Copies of
  // everything are, from the fourth on, so far apart that they take no more than their share of the time. Throws SystemError,
  // UsageError (a dtype that safetensors does not know), PeerLost.
  void keep(int64_t step, const TensorFile& common, const TensorFile& own);

 private:
  void find(bool in_parts);
  int64_t take_over(const std::vector<JobMemory::Kept>& kept, const StateImage& manifest) const;
  int64_t steps_between(double cost) const;

  World world_;
  JobMemory& memory_;
  double share_of_time_;
  Optimizer* const in_place_;  // null: `common` is copied
  DoubleBuffer common_;
  DoubleBuffer own_;
  std::optional<Found> found_;
  bool goes_on_ = false;  // with the images of its predecessor, in a World of the same size
  bool is_whole_ = false;
  int64_t kept_ = 0;         // how often
  int64_t steps_ = 0;        // since the last keep()
  int64_t between_ = 1;      // steps
  Stopwatch since_last_;     // keep()
  double step_seconds_ = 0;  // mean of those between the last two
  Stopwatch cost_;           // since is_due() said so
};

}  // namespace lockstep
