// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/measured_steps.h"

#include <algorithm>

#include "lockstep/base/median.h"
#include "lockstep/base/proc_file.h"
#include "lockstep/deadline.h"

namespace lockstep::plan {
namespace {

constexpr const char* kOwnMemory = "/proc/self/smaps_rollup";
constexpr int kSizes = 6;         // of batches, each twice the one before
constexpr int kFewestRounds = 3;  // over all sizes
constexpr int kUsualRounds = 8;
constexpr int kMostSteps = 40;  // of one size in a round

std::vector<std::int64_t> sizes_up_to(std::int64_t batch) {
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < kSizes && (sizes.empty() || sizes.back() > 1); ++i)
    sizes.push_back(std::max<std::int64_t>(1, batch >> i));
  std::ranges::reverse(sizes);
  return sizes;
}

double computing(const StepTimes& times) { return times.forward + times.backward; }

struct Size {
  Batch batch;
  double step = 0;  // seconds of a first one, on the slowest rank
  std::vector<StepTimes> alone{}, at_once{};
};

// The sizes that can be measured in that time, and what a rank needs for them. A first step of each makes room.
std::vector<Size> try_sizes(const World& world, Training& training, const Datasets& data, std::int64_t batch,
                            double limit, std::vector<SizedTime>& memory) {
  std::vector<Size> sizes;
  double all = 0;
  for (const std::int64_t samples : sizes_up_to(batch)) {
    const double needed = sizes.empty() ? 0 : 2 * sizes.back().step * (1 + 2 * kFewestRounds);
    if (all + needed > limit) break;
    Size size{.batch = batch_of(data, samples)};
    training.step(size.batch);
    size.step = largest_of(world, computing(training.step(size.batch)));
    all += size.step * 2 * kFewestRounds;
    memory.push_back({.bytes = sum_of(world, own_bytes()) / world.size(), .seconds = static_cast<double>(samples)});
    sizes.push_back(std::move(size));
  }
  return sizes;
}

void measure_round(const World& world, Training& training, Size& size, int steps) {
  if (world.rank() == 0)
    for (int i = 0; i < steps; ++i) size.alone.push_back(training.step(size.batch));
  world.barrier();
  for (int i = 0; i < steps && world.size() > 1; ++i) {
    world.barrier();
    size.at_once.push_back(training.step(size.batch));
  }
}

StepTimes mean_over(const World& world, StepTimes times) {
  for (double* const part : {&times.forward, &times.backward, &times.update})
    *part = sum_of(world, *part) / world.size();
  return times;
}

// Without the tenth that is fastest and the tenth that is slowest.
void add_spread(std::vector<double>& spread, const std::vector<StepTimes>& steps) {
  std::vector<double> seconds;
  for (const StepTimes& each : steps) seconds.push_back(computing(each));
  std::ranges::sort(seconds);
  const double middle = median(seconds);
  const std::size_t cut = seconds.size() / 10;
  for (std::size_t i = cut; i < seconds.size() - cut; ++i) spread.push_back(seconds[i] / middle);
}

}  // namespace

Training::Training(const Subject& subject, int devices) : devices_(devices) {
  StrategyOptions options = subject.strategy;
  options.kind = devices == 1 ? StrategyKind::kSingle : StrategyKind::kTowers;
  options.devices = devices;
  options.places = {};
  options.towers = {};
  options.ddp = {};
  options.compression = {};
  strategy_ = make_strategy(World::single(), subject.task, options);
}

StepTimes Training::step(const Batch& batch) {
  const PhaseTimes before = strategy_->phases();
  const Stopwatch watch;
  strategy_->forward_backward(batch);
  strategy_->update();
  const double all = watch.seconds();
  const PhaseTimes& after = strategy_->phases();
  const double backward = after.backward - before.backward, update = after.update - before.update;
  const double exchange = after.exchange - before.exchange;
  return {.samples = batch.size() / devices_,
          .forward = all - backward - exchange - update,
          .backward = backward,
          .update = update};
}

Batch batch_of(const Datasets& data, std::int64_t samples) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(samples));
  for (std::int64_t i = 0; i < samples; ++i) indices[static_cast<std::size_t>(i)] = i % data.train->size();
  return data.train->make_batch(indices);
}

StepTimes medians(const std::vector<StepTimes>& steps) {
  const auto of = [&](double StepTimes::*member) {
    std::vector<double> values;
    for (const StepTimes& each : steps) values.push_back(each.*member);
    return median(values);
  };
  return {.samples = steps.front().samples,
          .forward = of(&StepTimes::forward),
          .backward = of(&StepTimes::backward),
          .update = of(&StepTimes::update)};
}

MeasuredSteps measure_steps(const World& world, Training& training, const Datasets& data, std::int64_t batch,
                            double seconds) {
  MeasuredSteps measured{.alone = {.at_once = 1}, .at_once = {.at_once = world.size()}};
  std::vector<Size> sizes = try_sizes(world, training, data, batch, seconds, measured.memory);
  const double for_each = seconds / kUsualRounds / 2 / static_cast<double>(sizes.size());
  const Stopwatch watch;
  for (int round = 0; round < kFewestRounds || largest_of(world, watch.seconds()) < seconds; ++round)
    for (Size& size : sizes)
      measure_round(world, training, size, std::clamp(static_cast<int>(for_each / size.step), 1, kMostSteps));
  for (const Size& size : sizes) {
    if (world.size() > 1) measured.at_once.points.push_back(mean_over(world, medians(size.at_once)));
    if (world.rank() != 0) continue;
    measured.alone.points.push_back(medians(size.alone));
    add_spread(measured.spread, size.alone);
  }
  std::ranges::sort(measured.spread);
  return measured;
}

Curve measure_device_threads(const Subject& subject, const Datasets& data, const Curve& alone, int devices,
                             double handover, double seconds) {
  Curve curve{.at_once = devices, .in_one_process = true}, now;
  Training one(subject), all(subject, devices);
  std::vector<std::vector<StepTimes>> of_one, of_all;
  std::vector<Batch> small, large;
  for (const StepTimes& point : alone.points) {
    if (!small.empty() && point.samples * devices > subject.batch) break;
    small.push_back(batch_of(data, point.samples));
    large.push_back(batch_of(data, point.samples * devices));
    one.step(small.back());
    all.step(large.back());
  }
  of_one.resize(small.size());
  of_all.resize(small.size());
  const Stopwatch watch;
  for (int round = 0; round < kFewestRounds || watch.seconds() < seconds; ++round)
    for (std::size_t i = 0; i < small.size(); ++i) {
      of_one[i].push_back(one.step(small[i]));
      for (int k = 0; k < 3; ++k) of_all[i].push_back(all.step(large[i]));
    }
  for (std::size_t i = 0; i < small.size(); ++i) {
    now.points.push_back(medians(of_one[i]));
    StepTimes times = medians(of_all[i]);
    for (double* const part : {&times.forward, &times.backward, &times.update}) *part = std::max(0.0, *part - handover);
    curve.points.push_back(times);
  }
  undo_drift(curve, now, alone);
  return curve;
}

void scale(StepTimes& times, double factor) {
  for (double* const part : {&times.forward, &times.backward, &times.update}) *part *= factor;
}

void undo_drift(Curve& measured, const Curve& now, const Curve& before) {
  for (std::size_t i = 0; i < measured.points.size(); ++i) {
    StepTimes& point = measured.points[i];
    const double drift = computing(times_for(before, static_cast<double>(point.samples))) / computing(now.points[i]);
    scale(point, drift);
  }
}

double own_bytes() { return proc_bytes(kOwnMemory, "Private_Clean:") + proc_bytes(kOwnMemory, "Private_Dirty:"); }

double shared_bytes() { return proc_bytes(kOwnMemory, "Shared_Clean:") + proc_bytes(kOwnMemory, "Shared_Dirty:"); }

double sum_of(const World& world, double value) {
  const torch::Tensor tensor = torch::full({1}, value, torch::kFloat64);
  world.all_reduce(tensor, ReduceOp::kSum);
  return tensor.item<double>();
}

double largest_of(const World& world, double value) {
  const torch::Tensor tensor = torch::full({1}, value, torch::kFloat64);
  world.all_reduce(tensor, ReduceOp::kMax);
  return tensor.item<double>();
}

}  // namespace lockstep::plan
