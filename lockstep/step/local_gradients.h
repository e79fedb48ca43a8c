// SPDX-License-Identifier: Apache-2.0
// step/local_gradients.h: gradients of this process, which need no exchange: the sum of several lists, such as one per
// device; or .grad alone.
//
// Flow:    .grad, or set() -> begin_update() -> step/update/
// Owns:    copies of gradients that are sparse or in another memory order, during a step
// Threads: one thread
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <functional>
#include <vector>

#include "lockstep/step/exchange.h"

namespace lockstep {

// Calls work(device) for each GPU that devices of this process have, at the same time, on a thread whose current device it is.
// Blocks until the GPUs are done with what it put on their streams. Throws what `work` throws; PeerLost.
using OnEachGpu = std::function<void(const std::function<void(torch::Device)>& work)>;

class LocalGradients : public GradientSource {
 public:
  explicit LocalGradients(ParallelFor parallel_for = on_own_cores) : parallel_for_(std::move(parallel_for)) {}

  // Gradients of parameters on several GPUs of this process, each of which updates its own.
  explicit LocalGradients(OnEachGpu on_each_gpu) : LocalGradients() { on_each_gpu_ = std::move(on_each_gpu); }
  const OnEachGpu& on_each_gpu() const { return on_each_gpu_; }  // empty: the parameters are in one place

  // For the next step: lists[source][parameter], in the order of the optimizer's parameters; undefined: none. Without
  // it a step uses each parameter's .grad.
  void set(std::vector<Tensors> lists) { lists_ = std::move(lists); }

  WeightedGradients begin_update(const Tensors& parameters, const StepSettings& settings) override;
  void end_update() override;
  void release() { current_.clear(); }  // instead of end_update(): the caller marks what was written

 private:
  ParallelFor parallel_for_;
  OnEachGpu on_each_gpu_;
  std::vector<Tensors> lists_;    // for the next step
  std::vector<Tensors> current_;  // of this step
  Tensors updated_;               // parameters of this step
};

// The gradient, dense and in the parameter's memory order: itself if it is so already, else a copy. Undefined if
// `gradient` is.
torch::Tensor gradient_like(const torch::Tensor& parameter, const torch::Tensor& gradient);
inline torch::Tensor gradient_like(const torch::Tensor& parameter) {
  return gradient_like(parameter, parameter.grad());
}

}  // namespace lockstep
