// SPDX-License-Identifier: Apache-2.0
// step/layout.h: decides, once, where a program's parameters lie and which way its gradients go. layout_test.cc holds
// the table.
//
// Threads: pure functions
// Ranks:   no communication; all ranks get the same answer, as they have the same program
#pragma once

#include <string>

#include "lockstep/base/process/environment_switch.h"
#include "lockstep/ddp.h"

namespace lockstep {

enum class StepLayout {
  kPublished,      // all ranks share the parameters and read each other's gradients in place
  kSharedBuckets,  // the ranks of a machine share the parameters; buckets bring the mean, each rank updates a slice
  kSlices,         // each GPU has its own parameters and gets the mean of a slice, which it updates
  kOwnBuckets,     // each rank has its own parameters; buckets bring the mean, each rank updates all
};

inline bool shares_parameters(StepLayout layout) {
  return layout == StepLayout::kPublished || layout == StepLayout::kSharedBuckets;
}

// The world, its device and the optimizer.
struct LayoutInput {
  int ranks = 1;
  int ranks_on_machine = 1;
  int fewest_ranks = 0;  // with which the job goes on after a loss; 0: it ends
  bool is_on_gpus = false;
  bool is_fused = false;      // one of lockstep's optimizers updates
  bool is_layerwise = false;  // LAMB or LARS
  bool updates_all = true;    // the optimizer holds all parameters that are trained, and none has sparse gradients
  std::string here{};         // for errors
};

// Throws UsageError: virtual shards, and why they can't be had.
StepLayout choose_layout(const LayoutInput& input, const DistributedDataParallelOptions& options);

// Throws UsageError unless any number of ranks from `fewest` to `ranks` can share out the shards. fewest 0: the job ends
// with the first loss.
void require_shards_for_fewer_ranks(int shards, int fewest, int ranks);

// By the word of `lockstep run --min-ranks`; 0: nobody has said so.
inline int fewest_ranks_of_launcher() { return number_in_variable("LOCKSTEP_MIN_RANKS"); }

}  // namespace lockstep
