// SPDX-License-Identifier: Apache-2.0
// gradient/local_gradients.h: gradients of this process: the sum of several lists, such as one per device; or .grad
// alone, where it is the mean already or where there is one rank.
//
// Flow:    .grad, or set() -> begin_update() -> optimizer/
// Owns:    copies of gradients that are sparse or in another memory order, during a step
// Threads: one thread
// Ranks:   where the parameters are shared, .grad is the same mean on every rank (gradient/reducer.h), and each rank
//          updates a slice
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/gradient/gradient_source.h"
#include "lockstep/gradient/gradient_watch.h"
#include "lockstep/model/parameter_block.h"

namespace lockstep {

// Calls work(device) for each GPU that devices of this process have, at the same time, on a thread whose current device it is.
// Blocks until the GPUs are done with what it put on their streams. Throws what `work` throws; PeerLost.
using OnEachGpu = std::function<void(const std::function<void(torch::Device)>& work)>;

class LocalGradients : public GradientSource {
 public:
  // With shared parameters, where it is collective and blocks: the memory of the ranks that share them, and their block, which is checked before and marked
  // after each step.
  explicit LocalGradients(ParallelFor parallel_for = on_own_cores,
                          std::shared_ptr<SharedMemory> memory = SharedMemory::alone(),
                          std::shared_ptr<ParameterBlock> block = nullptr)
      : parallel_for_(std::move(parallel_for)),
        memory_(std::move(memory)),
        block_(std::move(block)),
        agreement_(memory_) {}

  // Of parameters that are on several GPUs of this process, each of which updates its own.
  explicit LocalGradients(OnEachGpu on_each_gpu) : LocalGradients() { on_each_gpu_ = std::move(on_each_gpu); }
  const OnEachGpu& on_each_gpu() const { return on_each_gpu_; }  // empty: the parameters are in one place

  // For the next step: lists[source][parameter], in the order of the optimizer's parameters; undefined: none. Without
  // it a step uses each parameter's .grad.
  void set(std::vector<std::vector<torch::Tensor>> lists) { lists_ = std::move(lists); }

  // With shared parameters: .grad of these is the mean, on every rank. One that is written by hand until the next step, to
  // clip it for instance, must be so on all ranks.
  void remember_mean(const std::vector<NamedTensor>& parameters) {
    watch_.remember(parameters);
    is_exchanged_ = true;
    has_stepped_ = false;
  }

  // With several ranks: from now on a .grad that no remember_mean() has seen, and no step() has used, is this rank's own.
  void require_exchanges() {
    requires_exchanges_ = true;
    is_exchanged_ = false;
  }

  // Whether it was, until the last step().
  bool mean_was_changed() const { return mean_was_changed_; }

  // With shared parameters: .grad is this rank's own until the next remember_mean(). A step() until then throws, unless
  // there is no .grad.
  void not_exchanged() { is_exchanged_ = false; }

  const std::shared_ptr<SharedMemory>& memory() const override { return memory_; }
  WeightedGradients begin_update(const std::vector<torch::Tensor>& parameters, const StepSettings& settings) override;
  void end_update() override;

 private:
  ParallelFor parallel_for_;
  OnEachGpu on_each_gpu_;
  std::shared_ptr<SharedMemory> memory_;
  std::shared_ptr<ParameterBlock> block_;
  StepAgreement agreement_;
  GradientWatch watch_;
  bool is_exchanged_ = true;  // what is in .grad
  bool requires_exchanges_ = false;
  bool has_stepped_ = false;                         // since the last exchange
  bool mean_was_changed_ = false;                    // by hand, before the last step
  std::vector<std::vector<torch::Tensor>> lists_;    // for the next step
  std::vector<std::vector<torch::Tensor>> current_;  // of this step
  std::vector<torch::Tensor> updated_;               // parameters of this step
};

// The gradient, dense and in the parameter's memory order: itself if it is so already, else a copy. Undefined if
// `gradient` is.
torch::Tensor gradient_like(const torch::Tensor& parameter, const torch::Tensor& gradient);
inline torch::Tensor gradient_like(const torch::Tensor& parameter) {
  return gradient_like(parameter, parameter.grad());
}

}  // namespace lockstep
