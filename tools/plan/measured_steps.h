// SPDX-License-Identifier: Apache-2.0
// tools/plan/measured_steps.h: how long training steps take: of one rank while the others wait, and of all at the same time;
// and what messages take (tools/plan/measure_messages.cc).
//
// Flow:    tools/plan/measure.h -> here -> tools/plan/profile.h
// Threads: the caller's
// Ranks:   all ranks of a world call measure_steps() together
#pragma once

#include "tools/plan/measure.h"

namespace lockstep::plan {

// One replica that is trained on one device, or one on each of several devices.
class Training {
 public:
  explicit Training(const Subject& subject, int devices = 1);

  Strategy& strategy() { return *strategy_; }
  // Counts as forward all that is neither backward, exchange nor update. The samples are those of a device.
  StepTimes step(const Batch& batch);

 private:
  int devices_;
  std::unique_ptr<Strategy> strategy_;
};

// The first samples of the dataset, again and again if there are too few.
Batch batch_of(const Datasets& data, int64_t samples);

struct MeasuredSteps {
  Curve alone, at_once;             // at_once: the mean over all ranks
  std::vector<double> spread;       // single steps of the curve `alone` over their median, sorted
  std::vector<SizedMemory> memory;  // as Profile::memory_of_rank
};

// Trains with `batch` samples, half as many, and so on. Takes about `seconds`, in rounds over all sizes, so that a machine
// that is slower for a while is so for all of them; longer where three steps take longer.
MeasuredSteps measure_steps(const World& world, Training& training, const Datasets& data, int64_t batch,
                            double seconds);

// Measures `kind` in one process, for the sizes of `alone` as far as they make no more than subject.batch together: so many device
// threads at once, or one device of so many threads. Takes about `seconds`. Corrects for how the machine's speed has changed since
// `alone` was measured. Leaves torch with one thread.
Curve measure_together(const Subject& subject, const Datasets& data, const Curve& alone, Curve kind, double seconds);

void scale(StepTimes& times, double factor);

// Sets Profile::loopback, loopback_work and connection_bytes: what messages between machines take without a link. Two
// machines, or four, are threads of this process, with Gloo between them over loopback, encrypted as always. Takes about a
// second. A process of its own calls it: memory that was freed before would hide what connections take. Throws as World does.
void measure_messages(Profile& profile);

double own_bytes();     // memory that this process shares with no other
double shared_bytes();  // the rest of it
double sum_of(const World& world, double value);
double largest_of(const World& world, double value);

}  // namespace lockstep::plan
