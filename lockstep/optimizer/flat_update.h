// SPDX-License-Identifier: Apache-2.0
// optimizer/flat_update.h: reduces gradients and updates parameters in one pass over memory, a slice on each rank.
//
// Flow:    gradient/gradient_source.h + UpdateRule -> here -> parameters, optimizer state
// Owns:    scratch memory for gradients and norms; the optimizer state is once per machine where ranks share memory
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
#include <optional>
#include <vector>

#include "lockstep/gradient/gradient_source.h"
#include "lockstep/optimizer.h"

namespace lockstep {

// The parameters of an optimizer and what it keeps beside each of them: tensors of the parameter's shape and memory order,
// of float32 for 16-bit parameters. Where each rank has a slice of them: beside each part of it (gradient/gradient_slices.h).
struct OptimizerState {
  std::vector<torch::Tensor> parameters;  // each once, also if it has two names
  std::vector<std::size_t> group_of;      // the parameter group of each
  std::vector<std::int64_t> steps;        // updates so far
  std::vector<std::vector<torch::Tensor>>
      arrays;                           // [name][parameter or part], in the order of UpdateRule::state_names()
  std::vector<torch::Tensor> averages;  // with ema_decay
  std::vector<torch::Tensor> masters;   // the float32 originals of 16-bit parameters; else undefined
  double ema_decay = 0;                 // 0: no moving average
};

inline bool is_16_bit(const torch::Tensor& parameter) { return parameter.element_size() == 2; }

// The dtype of what an optimizer keeps beside a parameter.
inline torch::ScalarType state_dtype(const torch::Tensor& parameter) {
  return is_16_bit(parameter) ? torch::kFloat32 : parameter.scalar_type();
}

// What one step works on. The mean gradient is divided by the loss scale and clipped before the rule gets it.
struct UpdateStep {
  const UpdateRule& rule;
  const std::vector<UpdateRule::Group>& groups;
  const WeightedGradients& gradients;
  ClippingOptions clipping{};
  std::optional<double> loss_scale{};  // given: the step is skipped on all ranks if any element on any is not finite
};

class FlatUpdate {
 public:
  // Allocates the state of its parameters, which are dense and on the CPU; it must outlive this. Blocks. Throws
  // SystemError: no memory; PeerLost.
  FlatUpdate(std::shared_ptr<SharedMemory> memory, OptimizerState& state);
  ~FlatUpdate();

  // Updates this rank's slice of every parameter that some source has a gradient for. Blocks only if all gradients must
  // be seen first: once for clipping by norm and loss scaling, twice for layerwise rules. Returns false if the step was
  // skipped. Throws PeerLost.
  bool run(const UpdateStep& step);

  double gradient_norm() const;  // before clipping, of the last step; 0 if no norm was needed

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
