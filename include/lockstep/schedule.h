// SPDX-License-Identifier: Apache-2.0
// lockstep/schedule.h: the learning rate as a function of the step alone, so that resuming needs no state.
//
// Threads: pure functions
// Ranks:   no communication
#pragma once

#include <cstdint>

namespace lockstep {

enum class ScheduleKind { kConstant, kLinear, kCosine, kStep };
enum class LrScaling { kNone, kSqrt, kLinear };

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::kConstant;
  double warmup_steps = 0;   // rises linearly from 1/warmup_steps to 1; then the schedule begins
  double total_steps = 1;    // linear, cosine (Loshchilov and Hutter, 2017): reach `floor` here
  double floor = 0;          // linear, cosine: the last factor
  double drop_every = 1;     // step: steps between drops
  double drop_factor = 0.1;  // step: factor of each drop
};

// The factor of the base learning rate at `step` (from 0).
double schedule_factor(const ScheduleOptions& options, int64_t step);

// The learning rate for `batch_size` if `lr` suits `base_batch_size`: unchanged; times the square root of the ratio
// (0.001 for 100 samples gives 0.002 for 400); or times the ratio (Goyal et al., 2017).
double scaled_learning_rate(double lr, LrScaling scaling, int64_t batch_size, int64_t base_batch_size);

}  // namespace lockstep
