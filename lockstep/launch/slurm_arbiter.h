// SPDX-License-Identifier: Apache-2.0
// launch/slurm_arbiter.h: a voter that asks Slurm's controller which nodes are alive.
//
// Flow:    arbiter.h -> here -> sinfo
// Threads: one
//
// It votes for the half whose nodes all respond, if none of the other half does, by the controller's word. It remembers
// nothing: should the controller say first that one half is gone and then that it is the other, both would go on.
#pragma once

#include "lockstep/launch/arbiter.h"

namespace lockstep {

class SlurmArbiter final : public Arbiter {
 public:
  std::string answer(const ArbiterQuestion& question) override;
};

// sinfo's lines "NODE STATE": all of `here` respond, and none of `lost`.
bool slurm_prefers(const std::string& lines, const std::vector<std::string>& here,
                   const std::vector<std::string>& lost);

}  // namespace lockstep
