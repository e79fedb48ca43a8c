// SPDX-License-Identifier: Apache-2.0
// lockstep/gradient_scaler.h: keeps float16 gradients from underflow: the loss is multiplied by a scale, step() divides
// the gradients by it again, and a step whose gradients overflowed is skipped on all ranks (Micikevicius et al., "Mixed
// Precision Training", ICLR 2018).
//
//   ddp.backward(scaler.scale(loss), samples);
//   scaler.step(optimizer);
//
// Owns:    the scale, together with its copies and the optimizer that it was given: each step() of that one adjusts it, also
//          those in DistributedDataParallel::join()
// Threads: one thread
// Ranks:   every rank makes the same calls; all decide alike, from the mean gradient. A rank that calls join() before its
//          first step() has no scale yet: all ranks get MismatchError
#pragma once

#include "lockstep/optimizer.h"

namespace lockstep {

struct GradientScalerOptions {
  double initial_scale = 65536;
  double growth = 2;     // after `growth_interval` steps without overflow
  double backoff = 0.5;  // after an overflow
  int64_t growth_interval = 2000;
};

class GradientScaler {
 public:
  explicit GradientScaler(const GradientScalerOptions& options = {});  // throws UsageError

  Tensor scale(const Tensor& loss) const { return loss * current_scale(); }

  // Calls optimizer.step() with gradients divided by the scale; the scale is then adjusted. Returns false if the step was
  // skipped.
  bool step(Optimizer& optimizer);

  double current_scale() const;

  // The scale and what else decides on the next one, for a checkpoint of your own; Recovery::keep() calls both. The same on every
  // rank. Throws CheckpointError: not what state() has returned.
  std::string state() const;
  void set_state(const std::string& state);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep
