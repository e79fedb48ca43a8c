// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lockstep {
namespace {

// From 0 after the warmup to 1.
double after_warmup(const ScheduleOptions& options, double step) {
  const double length = std::max(1.0, options.total_steps - options.warmup_steps);
  return std::clamp((step - options.warmup_steps) / length, 0.0, 1.0);
}

// above: from 1 to 0.
double over_floor(const ScheduleOptions& options, double above) { return options.floor + (1 - options.floor) * above; }

}  // namespace

double schedule_factor(const ScheduleOptions& options, int64_t step) {
  const auto now = static_cast<double>(step);
  if (now < options.warmup_steps) return (now + 1) / options.warmup_steps;
  switch (options.kind) {
    case ScheduleKind::kConstant: return 1;
    case ScheduleKind::kLinear: return over_floor(options, 1 - after_warmup(options, now));
    case ScheduleKind::kCosine:
      return over_floor(options, 0.5 * (1 + std::cos(std::numbers::pi * after_warmup(options, now))));
    case ScheduleKind::kStep: return std::pow(options.drop_factor, std::floor(now / options.drop_every));
  }
  return 1;
}

double scaled_learning_rate(double lr, LrScaling scaling, int64_t batch_size, int64_t base_batch_size) {
  const double ratio = static_cast<double>(batch_size) / static_cast<double>(base_batch_size);
  switch (scaling) {
    case LrScaling::kNone: return lr;
    case LrScaling::kSqrt: return lr * std::sqrt(ratio);
    case LrScaling::kLinear: return lr * ratio;
  }
  return lr;
}

}  // namespace lockstep
