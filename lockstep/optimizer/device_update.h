// SPDX-License-Identifier: Apache-2.0
// optimizer/device_update.h: updates parameters that are on GPUs with libtorch's kernels for whole lists of tensors.
//
// Flow:    .grad, or gradient/gradient_slices.h + UpdateRule -> here -> parameters, optimizer state
// Owns:    nothing; the optimizer state is on the parameters' devices
// Threads: one thread, whose current streams the work is put on; with several GPUs a thread for each
// Ranks:   no communication; with slices all ranks make the same calls, and those that need a norm or whole state send
#pragma once

#include <torch/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/gradient/gradient_slices.h"
#include "lockstep/gradient/local_gradients.h"
#include "lockstep/optimizer/flat_update.h"

namespace lockstep {

class DeviceUpdate {
 public:
  // Allocates the state of its parameters, which are dense and on GPUs; it must outlive this. slices: where this rank updates
  // a part of them, all of which are the state's, by a rule that is not layerwise; null: all of them. on_each_gpu: of
  // parameters on several GPUs.
  explicit DeviceUpdate(OptimizerState& state, std::shared_ptr<GradientSlices> slices = nullptr,
                        OnEachGpu on_each_gpu = {});

  // Updates every parameter that has a .grad, which stays as it is; or its slice. Waits for the GPU only with clipping by norm or
  // loss scaling, for one number. Returns false if the step was skipped.
  bool run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups, const ClippingOptions& clipping,
           const std::optional<double>& loss_scale);

  double gradient_norm() const { return gradient_norm_; }

  // What `of`, one of the state's lists, has beside parameter i. With slices a copy, put together from those of all ranks: all
  // call. Throws PeerLost.
  torch::Tensor beside(const std::vector<torch::Tensor>& of, std::size_t i) const;

  // The other way: undefined are zeros. Sends nothing.
  void set_beside(const std::vector<torch::Tensor>& of, std::size_t i, const torch::Tensor& value) const;

 private:
  struct Updated;
  using UpdatedOnGpus = std::vector<Updated>;  // in the order in which the parameters name the GPUs

  bool is_updated(const torch::Tensor& parameter) const;
  void on_each(const std::shared_ptr<UpdatedOnGpus>& all, const std::function<void(Updated&)>& work) const;
  void find_updated(Updated& updated) const;
  void measure(Updated& updated) const;
  double norm_of(const UpdatedOnGpus& all) const;
  static void clip(Updated& updated, double factor, double max_value);
  void apply(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups, const Updated& updated) const;
  void average(const Updated& updated) const;

  OptimizerState& state_;
  std::shared_ptr<GradientSlices> slices_;
  OnEachGpu on_each_gpu_;
  std::vector<std::size_t> parameter_of_;  // of each part: its index in OptimizerState::parameters
  double gradient_norm_ = 0;
};

}  // namespace lockstep
