// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient_scaler.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {

GradientScaler::GradientScaler(const GradientScalerOptions& options)
    : options_(options), scale_(options.initial_scale) {
  if (options.initial_scale <= 0 || options.growth <= 1 || options.backoff <= 0 || options.backoff >= 1 ||
      options.growth_interval < 1)
    throw UsageError(
        {.what = concat("a gradient scaler with scale ", options.initial_scale, ", growth ", options.growth,
                        ", backoff ", options.backoff, ", interval ", options.growth_interval),
         .next = "scale > 0, growth > 1, backoff in (0, 1), interval of at least 1"});
}

bool GradientScaler::step(Optimizer& optimizer) {
  optimizer.set_loss_scale(scale_);
  optimizer.step();
  if (optimizer.skipped()) {
    scale_ *= options_.backoff;
    good_steps_ = 0;
    return false;
  }
  if (++good_steps_ == options_.growth_interval) {
    scale_ *= options_.growth;
    good_steps_ = 0;
  }
  return true;
}

}  // namespace lockstep
