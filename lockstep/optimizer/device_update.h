// SPDX-License-Identifier: Apache-2.0
// optimizer/device_update.h: updates parameters that are on a GPU with libtorch's kernels for whole lists of tensors.
//
// Flow:    .grad + UpdateRule -> here -> parameters, optimizer state
// Owns:    nothing; the optimizer state is on the parameters' device
// Threads: one thread, whose current streams the work is put on
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <optional>
#include <vector>

#include "lockstep/optimizer/flat_update.h"

namespace lockstep {

class DeviceUpdate {
 public:
  // Allocates the state of its parameters, which are dense and on one GPU; it must outlive this.
  explicit DeviceUpdate(OptimizerState& state);

  // Updates every parameter that has a .grad, which stays as it is. Waits for the GPU only with clipping by norm or loss
  // scaling, for one number. Returns false if the step was skipped.
  bool run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups, const ClippingOptions& clipping,
           const std::optional<double>& loss_scale);

  double gradient_norm() const { return gradient_norm_; }

 private:
  struct Updated;
  Updated find_updated() const;
  bool clip(std::vector<torch::Tensor>& gradients, const ClippingOptions& clipping,
            const std::optional<double>& loss_scale);
  void average(const Updated& updated);

  OptimizerState& state_;
  double gradient_norm_ = 0;
};

}  // namespace lockstep
