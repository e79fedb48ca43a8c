// SPDX-License-Identifier: Apache-2.0
// lockstep/gradient_scaler.h: keeps float16 gradients from underflow: the loss is multiplied by a scale, step() divides
// the gradients by it again, and a step whose gradients overflowed is skipped on all ranks (Micikevicius et al., "Mixed
// Precision Training", ICLR 2018).
//
//   ddp.backward(scaler.scale(loss), samples);
//   scaler.step(optimizer);
//
// Threads: one thread
// Ranks:   every rank makes the same calls; all decide alike, from the mean gradient
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "lockstep/optimizer.h"

namespace lockstep {

struct GradientScalerOptions {
  double initial_scale = 65536;
  double growth = 2;     // after `growth_interval` steps without overflow
  double backoff = 0.5;  // after an overflow
  std::int64_t growth_interval = 2000;
};

class GradientScaler {
 public:
  explicit GradientScaler(const GradientScalerOptions& options = {});  // throws UsageError

  torch::Tensor scale(const torch::Tensor& loss) const { return loss * scale_; }

  // Calls optimizer.step() with gradients divided by the scale, then adjusts the scale. Returns false if the step was
  // skipped.
  bool step(Optimizer& optimizer);

  double current_scale() const { return scale_; }

 private:
  GradientScalerOptions options_;
  double scale_;
  std::int64_t good_steps_ = 0;  // since the scale last changed
};

}  // namespace lockstep
