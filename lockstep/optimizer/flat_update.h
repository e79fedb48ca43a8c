// optimizer/flat_update.h: reduces gradients and updates parameters in one pass over memory, each rank a slice.
//
// Flow:    gradient/step_gradients.h + UpdateRule -> here -> parameters, optimizer state
// Owns:    the optimizer state: once per machine where ranks share memory
// Threads: one thread, which spreads the work over torch's intra-op threads
// Ranks:   the ranks that share `memory` make the same calls in the same order
//
// Parameters are cut into pieces of at most 4096 elements, the same on every rank, and rank r of p owns a run of them
// that holds 1/p of all elements. For a piece it sums the gradients of all ranks into a buffer that stays in its
// first-level cache, and applies the rule from there: gradients, state and parameters go through memory once.
//
// What a step moves, for K bytes of float32 parameters, p ranks and m state arrays, in the whole machine:
//   one pass                        reads (p + 1 + m) K, writes (1 + m) K
//   with clipping by norm, or LARS  2 K more
//   LAMB                            4 K more
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/collective/shared_memory.h"
#include "lockstep/gradient/step_gradients.h"
#include "lockstep/update_rule.h"

namespace lockstep {

// What happens to the mean gradient before the rule sees it.
struct GradientTreatment {
  double max_norm = 0;              // scales all gradients so that their common 2-norm is at most this; 0: as they are
  double max_value = 0;             // cuts each element to [-max_value, max_value], after max_norm; 0: as they are
  double loss_scale = 1;            // what the loss was multiplied by: divided out again
  bool skip_if_not_finite = false;  // on all ranks, if any element on any rank is not finite
};

class FlatUpdate {
 public:
  struct Parameter {
    torch::Tensor tensor;  // dense, on the CPU
    std::size_t group = 0;
  };
  struct Options {
    std::size_t states = 0;  // arrays beside each parameter
    double ema_decay = 0;    // 0: no moving average
  };

  // Blocks. Throws SystemError: no memory.
  FlatUpdate(std::shared_ptr<SharedMemory> memory, std::vector<Parameter> parameters, const Options& options);
  ~FlatUpdate();

  // Updates this rank's slice of every parameter that has a gradient on some rank. Blocks only if all gradients have
  // to be seen first (GradientTreatment, layer-wise rules). Returns false if the step was skipped. Throws PeerLost.
  bool run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups, const StepGradients& gradients,
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
