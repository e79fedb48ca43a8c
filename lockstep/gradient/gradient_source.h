// SPDX-License-Identifier: Apache-2.0
// gradient/gradient_source.h: how an optimizer obtains exchanged gradients.
//
// Flow:    gradient/local_gradients.h or gradient/shared_gradients.h -> here -> optimizer/
// Threads: one thread
// Ranks:   the ranks that share memory() call begin_update(), then end_update(), in each step
#pragma once

#include <torch/types.h>

#include <memory>
#include <vector>

#include "lockstep/collective/shared_memory.h"
#include "lockstep/error.h"
#include "lockstep/gradient/parallel_for.h"
#include "lockstep/gradient/step_agreement.h"

namespace lockstep {

// The gradients of one step. A parameter's mean gradient is the sum over sources s, in their order, of weights[s] times
// the gradient of s. A source is a rank, a virtual shard of a rank, or a device of this process. A source without a
// gradient counts as zero; a parameter that no source has a gradient for is left out of the step.
struct WeightedGradients {
  std::vector<double> weights;              // one per source; the same on every rank
  std::vector<const void*> pointers;        // [parameter][source]: dense, of the parameter's dtype and in its memory
                                            // order; nullptr: none
  ParallelFor parallel_for = on_own_cores;  // spreads the update over threads
};

class GradientSource {
 public:
  virtual ~GradientSource() = default;

  // The ranks that share the parameters: each updates a slice.
  virtual const std::shared_ptr<SharedMemory>& memory() const = 0;

  // How many sources its gradients have in each step, where they are in memory that outlives the ranks; else 0.
  virtual std::size_t kept_sources() const { return 0; }

  // The gradients of `parameters`. The pointers stay valid and unchanged until end_update(). Blocks until every rank's
  // gradients are there, and all ranks are about to update with the same `settings`. Throws UsageError: a gradient was
  // changed after backward(); MismatchError on all ranks: other settings, or a step that some ranks do not make;
  // PeerLost. Until then nothing was written.
  virtual WeightedGradients begin_update(const std::vector<torch::Tensor>& parameters,
                                         const StepSettings& settings) = 0;

  // This rank has updated its slice. Blocks until all ranks have: afterwards every parameter is new. Throws PeerLost.
  virtual void end_update() = 0;

  // The DistributedDataParallel that exchanged the gradients is gone: begin_update() throws UsageError from now on.
  void close() { is_closed_ = true; }

 protected:
  void require_open() const {
    if (is_closed_)
      throw UsageError({.what = "step() of an optimizer whose DistributedDataParallel is gone",
                        .likely =
                            "a DistributedDataParallel that was not kept in a variable, or was destroyed too early: "
                            "nothing exchanges the gradients",
                        .next = "keep it as long as the optimizer steps, and call the model through it in Python"});
  }

 private:
  bool is_closed_ = false;
};

}  // namespace lockstep
