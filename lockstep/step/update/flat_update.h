// SPDX-License-Identifier: Apache-2.0
// step/update/flat_update.h: reduces gradients and updates parameters in one pass over memory, a slice on each rank.
//
// Flow:    step/exchange.h + UpdateRule -> here -> parameters, optimizer state
// Owns:    scratch memory for gradients and norms; the optimizer state is once per machine where ranks share memory
// Threads: one thread, which spreads the work over torch's intra-op threads
// Ranks:   the ranks that share `memory` make the same calls in the same order
//
// HACKING.md ("Update") says how: each rank takes its run of chunks. docs/design/fused-step.md has the memory traffic.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>

#include "lockstep/optimizer.h"
#include "lockstep/step/exchange.h"
#include "lockstep/step/update/journal_writer.h"
#include "lockstep/step/update/optimizer_state.h"

namespace lockstep {

class FlatUpdate {
 public:
  // Allocates the state of its parameters, which are dense and on the CPU; it must outlive this. journal: for updates that other
  // processes can finish, of an optimizer of lockstep's own whose parameters and gradients are in memory that outlives the ranks.
  // Collective, blocks. Throws SystemError: no memory; PeerLost.
  static std::unique_ptr<FlatUpdate> make(SharedMemoryPtr memory, OptimizerState& state,
                                          const JournalOptions& journal = {});
  virtual ~FlatUpdate() = default;

  // Updates this rank's slice of every parameter that some source has a gradient for. Blocks only if all gradients must
  // be seen first: once for clipping by norm and loss scaling, twice for layerwise rules. Returns false if the step was
  // skipped. Throws PeerLost.
  virtual bool run(const UpdateStep& step) = 0;

  virtual double gradient_norm() const = 0;  // before clipping, of the last step; 0 if no norm was needed
  virtual JournalWriter& journal() = 0;

  // Completes the step in which the ranks of `lost` were lost, if all of them had begun it, in their memory. lost.state then
  // is that after the step. The ranks of `memory` call together, and share the work out; none of the lost ones writes any
  // more. Blocks. Returns how many updates that makes since theirs began, skipped ones included. Throws PeerLost: call it
  // again with the ranks that come next.
  static uint64_t finish(SharedMemoryPtr memory, InterruptedUpdate& lost);
};

}  // namespace lockstep
