// SPDX-License-Identifier: Apache-2.0
// optimizer/adam_numbers.h: what Adam, AdamW and LAMB compute from their options before a step.
//
// Threads: pure functions
#pragma once

#include <cmath>
#include <cstdint>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/optimizer/adam_kernels.h"

namespace lockstep {

template <class Options>
const Options& checked_adam(const char* name, const Options& options) {
  const auto is_fraction = [](double value) { return value >= 0 && value < 1; };
  if (options.lr < 0 || options.weight_decay < 0 || options.eps < 0 || !is_fraction(options.beta1) ||
      !is_fraction(options.beta2))
    throw UsageError({.what = concat(name, " with lr ", options.lr, ", weight decay ", options.weight_decay, ", eps ",
                                     options.eps, ", betas ", options.beta1, " and ", options.beta2),
                      .likely = "a negative value, or a beta outside [0, 1)"});
  return options;
}

// step: from 1. lr: of the direction m / (sqrt(v) + eps), both corrected for bias. No weight decay.
template <class T, class Options>
AdamNumbers<T> adam_numbers(const Options& options, std::int64_t step, double lr) {
  const auto t = static_cast<double>(step);
  return {.beta1 = static_cast<T>(options.beta1),
          .rest1 = static_cast<T>(1 - options.beta1),
          .beta2 = static_cast<T>(options.beta2),
          .rest2 = static_cast<T>(1 - options.beta2),
          .root = static_cast<T>(1 / std::sqrt(1 - std::pow(options.beta2, t))),
          .rate = static_cast<T>(lr / (1 - std::pow(options.beta1, t))),
          .eps = static_cast<T>(options.eps),
          .coupled = 0,
          .keep = 1};
}

}  // namespace lockstep
