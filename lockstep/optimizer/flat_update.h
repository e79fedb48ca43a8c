// SPDX-License-Identifier: Apache-2.0
// optimizer/flat_update.h: reduces gradients and updates parameters in one pass over memory, a slice on each rank.
//
// Flow:    gradient/gradient_source.h + UpdateRule -> here -> parameters, optimizer state
// Owns:    the optimizer state: once per machine where ranks share memory
// Threads: one thread, which spreads the work over torch's intra-op threads
// Ranks:   the ranks that share `memory` make the same calls in the same order
//
// Parameters are cut into chunks of at most 4096 elements, the same on every rank, and each of p ranks owns a contiguous
// range of them with 1/p of all elements. For each chunk the owner sums the gradients of all ranks into a buffer that
// stays in its first-level cache, and applies the rule from there: gradients, state and parameters pass through memory
// once.
//
// Memory traffic of a step in the whole machine, for K bytes of float32 parameters, p ranks and m state arrays:
//   one pass                        reads (p + 1 + m) K, writes (1 + m) K
//   with clipping by norm, or LARS  2 K more
//   LAMB                            4 K more
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/collective/shared_memory.h"
#include "lockstep/gradient/gradient_source.h"
#include "lockstep/update_rule.h"

namespace lockstep {

// What is done to the mean gradient before the rule gets it, in this order.
struct GradientTreatment {
  double loss_scale = 1;            // what the loss was multiplied by: gradients are divided by it
  bool skip_if_not_finite = false;  // on all ranks, if any element on any rank is not finite
  double max_norm = 0;              // scales all gradients so that their common 2-norm is at most this; 0: off
  double max_value = 0;             // clamps each element to [-max_value, max_value]; 0: off
};

class FlatUpdate {
 public:
  struct Options {
    std::vector<std::size_t> group_of;  // the parameter group of each parameter
    std::size_t states = 0;             // arrays beside each parameter
    double ema_decay = 0;               // 0: no moving average
  };

  // parameters: dense, on the CPU. Blocks. Throws SystemError: no memory; PeerLost.
  FlatUpdate(std::shared_ptr<SharedMemory> memory, std::vector<torch::Tensor> parameters, Options options);
  ~FlatUpdate();

  // Updates this rank's slice of every parameter that some source has a gradient for. Blocks only if all gradients must
  // be seen first: once for clipping by norm and loss scaling, twice for layerwise rules. Returns false if the step was
  // skipped. Throws PeerLost.
  bool run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups, const WeightedGradients& gradients,
           const GradientTreatment& treatment);

  // Views of the state, shaped as the parameter: of float32 for 16-bit parameters.
  torch::Tensor state(std::size_t parameter, std::size_t number) const;
  torch::Tensor average(std::size_t parameter) const;  // with ema_decay
  torch::Tensor master(std::size_t parameter) const;   // the float32 original of a 16-bit parameter; else undefined
  std::int64_t& steps(std::size_t parameter);          // updates so far

  double gradient_norm() const;  // before clipping, of the last step; 0 if no norm was needed

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
