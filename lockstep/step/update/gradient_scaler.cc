// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient_scaler.h"

#include <cstring>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
struct GradientScaler::State {
  GradientScalerOptions options;
  struct Scale {
    double value;
    int64_t good_steps = 0;  // since it last changed
  } scale;

  double after_step(bool skipped) {
    if (skipped)
      scale = {scale.value * options.backoff};
    else if (++scale.good_steps == options.growth_interval)
      scale = {scale.value * options.growth};
    return scale.value;
  }
};

GradientScaler::GradientScaler(const GradientScalerOptions& options)
    : state_(std::make_shared<State>(State{options, {options.initial_scale}})) {
  if (options.initial_scale <= 0 || options.growth <= 1 || options.backoff <= 0 || options.backoff >= 1 ||
      options.growth_interval < 1)
    throw UsageError(
        {.what = concat("a gradient scaler with scale ", options.initial_scale, ", growth ", options.growth,
                        ", backoff ", options.backoff, ", interval ", options.growth_interval),
         .next = "scale > 0, growth > 1, backoff in (0, 1), interval of at least 1"});
}

bool GradientScaler::step(Optimizer& optimizer) {
  optimizer.set_loss_scale(state_->scale.value);
  optimizer.adjust_loss_scale([state = state_](bool skipped) { return state->after_step(skipped); });
  optimizer.step();
  return !optimizer.skipped();
}

double GradientScaler::current_scale() const { return state_->scale.value; }

std::string GradientScaler::state() const {
  return {reinterpret_cast<const char*>(&state_->scale), sizeof state_->scale};
}

void GradientScaler::set_state(const std::string& state) {
  if (state.size() != sizeof state_->scale)
    throw CheckpointError({.what = concat("not the state of a gradient scaler: ", state.size(), " bytes"),
                           .likely = "the state of another object",
                           .next = "give set_state() what state() has returned"});
  std::memcpy(&state_->scale, state.data(), state.size());
}

}  // namespace lockstep
