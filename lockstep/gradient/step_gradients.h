// gradient/step_gradients.h: what an optimizer that shares its parameters with other ranks asks of whoever exchanged
// the gradients: the two sides of one step().
//
// Flow:    gradient/published_gradients.h, strategy/ddp -> here -> optimizer/
// Threads: one thread
// Ranks:   every rank calls take(), then updated(), in each step
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/collective/shared_memory.h"
#include "lockstep/gradient/parallel_for.h"

namespace lockstep {

// The gradient of one parameter is the sum over sources s of weights[s] * (what `pointers` gives for s), in their
// order; a source without one counts as zero, and a parameter without any takes no part in the step.
struct StepGradients {
  std::vector<double> weights;  // per source; the same on every rank
  std::vector<const void*>
      pointers;  // parameter by parameter, `weights.size()` each: dense, of the parameter's dtype and
                 // in its memory order; nullptr: none
  ParallelFor parallel_for = on_own_cores;  // who updates
};

class GradientSource {
 public:
  virtual ~GradientSource() = default;

  // The ranks that share the parameters: each updates a slice.
  virtual const std::shared_ptr<SharedMemory>& memory() const = 0;

  // Those of `parameters`, which stay as they are until updated(). Blocks until every rank's are there.
  // Throws UsageError: no backward() before this step, or a gradient that was changed after it; PeerLost.
  virtual StepGradients take(const std::vector<torch::Tensor>& parameters) = 0;

  // This rank has updated its slice. Blocks until all have: afterwards every parameter is new. Throws PeerLost.
  virtual void updated() = 0;
};

// Where .grad is the mean already when step() is called (gradient/reducer.h): the ranks that share `memory` still
// update a slice each.
class MeanGradients : public GradientSource {
 public:
  explicit MeanGradients(std::shared_ptr<SharedMemory> memory) : memory_(std::move(memory)) {}
  const std::shared_ptr<SharedMemory>& memory() const override { return memory_; }
  StepGradients take(const std::vector<torch::Tensor>& parameters) override;
  void updated() override;

 private:
  std::shared_ptr<SharedMemory> memory_;
  std::vector<torch::Tensor> kept_;  // gradients in their parameters' order, during a step
};

// The sum over several lists in this process, such as what each of its devices has computed. It is taken inside of
// step().
class SummedGradients : public GradientSource {
 public:
  explicit SummedGradients(ParallelFor parallel_for = on_own_cores) : parallel_for_(std::move(parallel_for)) {}

  // lists[source][parameter]: for the next step, as the optimizer's parameters and in their order; undefined: none.
  void set(std::vector<std::vector<torch::Tensor>> lists) { lists_ = std::move(lists); }

  const std::shared_ptr<SharedMemory>& memory() const override { return memory_; }
  StepGradients take(const std::vector<torch::Tensor>& parameters) override;
  void updated() override { lists_.clear(); }

 private:
  ParallelFor parallel_for_;
  std::shared_ptr<SharedMemory> memory_ = SharedMemory::alone();
  std::vector<std::vector<torch::Tensor>> lists_;  // after take(): in their parameters' order
};

// The gradient of a parameter, dense, in its memory order and where it lies; a copy only where it is not. Undefined
// if there is none.
torch::Tensor gradient_like(const torch::Tensor& parameter, const torch::Tensor& gradient);
inline torch::Tensor gradient_like(const torch::Tensor& parameter) {
  return gradient_like(parameter, parameter.grad());
}

}  // namespace lockstep
