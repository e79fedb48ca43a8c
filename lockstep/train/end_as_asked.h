// SPDX-License-Identifier: Apache-2.0
// train/end_as_asked.h: how a rank ends after its job was asked to stop, as the scheduler wants it.
//
// Ranks: all ranks call
#pragma once

#include "lockstep/train/options.h"
#include "lockstep/world.h"

namespace lockstep {

// The exit code. Or asks Slurm to put the job into its queue again (rank 0 runs scontrol) and stays until it is killed: a
// job that ends by itself counts as done. Throws SystemError on all ranks if scontrol fails.
int end_as_asked(const World& world, const PreemptionOptions& options);

}  // namespace lockstep
