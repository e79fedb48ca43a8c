// SPDX-License-Identifier: Apache-2.0
// step/guards/step_check.h: LOCKSTEP_CHECK=n: every n-th exchange compares the parameters of all ranks bit by bit.
//
// Flow:    DistributedDataParallel, at the end of each exchange -> here -> an all-gather of hashes
// Owns:    a counter
// Threads: one thread
// Ranks:   all ranks make the same calls in the same order
//
// The parameters compared are those that the last step() left, in every layout: shared by the ranks of a machine or each
// rank's own, on one machine or several. base/process/page_guard.h is the other half of LOCKSTEP_CHECK.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/process/page_guard.h"
#include "lockstep/named_tensor.h"
#include "lockstep/world.h"

namespace lockstep {

class StepCheck {
 public:
  // Blocks. Sends 8 bytes per rank. Throws MismatchError: LOCKSTEP_CHECK differs between ranks.
  explicit StepCheck(World world, int interval = check_interval());

  // Every n-th call compares; it blocks then, and sends 8 bytes per parameter and rank. Throws MismatchError on all
  // ranks, naming the first parameter that differs and the ranks.
  void exchanged(const std::vector<NamedTensor>& parameters);

  // Compares now. `when` is for the error: "after 3 exchanges".
  void compare(const std::vector<NamedTensor>& parameters, const std::string& when) const;

  // A hash of a part of the parameters' bytes, another part at each exchange: of 4 KiB or a hundredth of all, whichever is
  // more. So a hundred exchanges see each byte. 0: none is on the CPU, or LOCKSTEP_CHECK is 0.
  double hash_of_part(const std::vector<NamedTensor>& parameters) const;

 private:
  World world_;
  int interval_;
  std::size_t exchanges_ = 0;
};

}  // namespace lockstep
