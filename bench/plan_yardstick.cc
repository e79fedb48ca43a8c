// SPDX-License-Identifier: Apache-2.0
#include "bench/plan_yardstick.h"

#include <algorithm>

#include <ATen/Parallel.h>

#include "lockstep/base/median.h"
#include "lockstep/deadline.h"

namespace lockstep::bench {
namespace {

// While this lives torch has one thread. Not for each step: oneDNN prepares its convolutions anew after every change.
class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

}  // namespace

YardstickPlan yardstick_for(const PlanCase& one, int cores) {
  if (one.has_device_threads()) return {.devices = one.devices > 1 ? cores : 1};
  return {.ranks = one.hosts * one.devices >= cores ? cores : 1};
}

Yardstick::Yardstick(const PlanCase& one, int cores, const World& world, std::optional<int> worker,
                     const Datasets& data)
    : plan_(yardstick_for(one, cores)), world_(world) {
  constexpr double kFor = 0.5;
  constexpr int kMostSteps = 50;
  if (worker && *worker < plan_.ranks) {
    training_.emplace(subject_of(one), plan_.devices);
    batch_ = plan::batch_of(data, plan_.devices * one.samples_of_device());
  }
  const OneThread one_thread;
  step();
  steps_ = std::clamp(static_cast<int>(kFor / plan::largest_of(world_, step())), 1, kMostSteps);
}

double Yardstick::seconds() {
  // What the other ranks still do for the barrier is over by then. Another one between the steps would bring that back.
  constexpr double kSettled = 0.05;
  const OneThread one_thread;
  world_.barrier();
  for (const Stopwatch watch; training_ && watch.seconds() < kSettled;) step();
  std::vector<double> seconds;
  for (int i = 0; i < steps_; ++i) seconds.push_back(step());
  return plan::sum_of(world_, median(seconds)) / plan_.ranks;
}

double Yardstick::step() {
  if (!training_) return 0;
  const plan::StepTimes times = training_->step(batch_);
  return times.computing();
}

std::optional<double> seconds_when_profiled(const plan::Profile& profile, const PlanCase& one) {
  const YardstickPlan plan = yardstick_for(one, profile.cores);
  const auto is_it = [&](const plan::Curve& curve) {
    return curve.threads == 1 && curve.at_once == plan.ranks * plan.devices &&
           curve.in_one_process == (plan.devices > 1);
  };
  const auto curve = std::ranges::find_if(profile.curves, is_it);
  if (curve == profile.curves.end()) return {};
  const plan::StepTimes times = plan::times_for(*curve, static_cast<double>(one.samples_of_device()));
  return times.computing();
}

}  // namespace lockstep::bench
