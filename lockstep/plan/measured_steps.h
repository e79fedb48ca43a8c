// SPDX-License-Identifier: Apache-2.0
// plan/measured_steps.h: how long training steps take: of one rank while the others wait, and of all at the same time.
//
// Flow:    plan/measure.h -> here -> plan/profile.h
// Threads: the caller's
// Ranks:   all ranks of a world call measure_steps() together
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/dataset.h"
#include "lockstep/plan/measure.h"
#include "lockstep/strategy.h"
#include "lockstep/world.h"

namespace lockstep::plan {

// One replica that is trained on one device, or one on each of several devices.
class Training {
 public:
  explicit Training(const Subject& subject, int devices = 1);

  Strategy& strategy() { return *strategy_; }
  // What is neither backward, exchange nor update counts as forward. The samples are those of a device.
  StepTimes step(const Batch& batch);

 private:
  int devices_;
  std::unique_ptr<Strategy> strategy_;
};

// The first samples of the dataset, again and again if there are too few.
Batch batch_of(const Datasets& data, std::int64_t samples);

StepTimes medians(const std::vector<StepTimes>& steps);

struct MeasuredSteps {
  Curve alone, at_once;             // at_once: the mean over all ranks
  std::vector<double> spread;       // single steps of the curve `alone` over their median, sorted
  std::vector<SizedMemory> memory;  // as Profile::memory_of_rank
};

// For `batch` samples, half as many, and so on. Takes about `seconds`, in rounds over all sizes, so that a machine that is
// slower for a while is so for all of them; longer where three steps take longer.
MeasuredSteps measure_steps(const World& world, Training& training, const Datasets& data, std::int64_t batch,
                            double seconds);

// Of one process with so many threads, for the sizes of `alone`, in about `seconds`; corrected for how the machine's speed has
// changed since `alone` was measured. Leaves torch with one thread.
Curve measure_threads(Training& training, const Datasets& data, const Curve& alone, int threads, double seconds);

// The same of so many device threads, as far as their samples make no more than subject.batch together. `handover`: seconds,
// which are taken off each part.
Curve measure_device_threads(const Subject& subject, const Datasets& data, const Curve& alone, int devices,
                             double handover, double seconds);

void scale(StepTimes& times, double factor);

// Makes up for a machine that was faster or slower when `now` was measured than when `before` was, both of the same thing: by
// one factor, the median over all sizes.
void undo_drift(Curve& measured, const Curve& now, const Curve& before);

double own_bytes();     // of this process: memory that it shares with no other
double shared_bytes();  // of this process: the rest
double sum_of(const World& world, double value);
double largest_of(const World& world, double value);

}  // namespace lockstep::plan
