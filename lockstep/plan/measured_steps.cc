// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/measured_steps.h"

#include <algorithm>
#include <functional>

#include <ATen/Parallel.h>

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
                            double limit, std::vector<SizedMemory>& memory) {
  std::vector<Size> sizes;
  double all = 0;
  for (const std::int64_t samples : sizes_up_to(batch)) {
    const double needed = sizes.empty() ? 0 : 2 * sizes.back().step * (1 + 2 * kFewestRounds);
    if (all + needed > limit) break;
    Size size{.batch = batch_of(data, samples)};
    training.step(size.batch);
    size.step = largest_of(world, computing(training.step(size.batch)));
    all += size.step * 2 * kFewestRounds;
    memory.push_back({.samples = samples, .bytes = sum_of(world, own_bytes()) / world.size()});
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

using StepOfSize = std::function<StepTimes(std::size_t)>;

// Medians of `step`, in turn with those of one rank that is alone: these say how the machine has drifted since `alone`.
Curve measure_in_turn(Curve curve, const Curve& alone, std::size_t sizes, double seconds, const StepOfSize& step_of_one,
                      const StepOfSize& step) {
  std::vector<std::vector<StepTimes>> of_one(sizes), measured(sizes);
  for (std::size_t i = 0; i < sizes; ++i) {  // the first ones make room
    step_of_one(i);
    step(i);
  }
  const Stopwatch watch;
  for (int round = 0; round < kFewestRounds || watch.seconds() < seconds; ++round)
    for (std::size_t i = 0; i < sizes; ++i) {
      of_one[i].push_back(step_of_one(i));
      for (int k = 0; k < 3; ++k) measured[i].push_back(step(i));
    }
  Curve now;
  for (std::size_t i = 0; i < sizes; ++i) {
    now.points.push_back(medians(of_one[i]));
    curve.points.push_back(medians(measured[i]));
  }
  undo_drift(curve, now, alone);
  return curve;
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

Curve measure_threads(Training& training, const Datasets& data, const Curve& alone, int threads, double seconds) {
  std::vector<Batch> batches;
  for (const StepTimes& point : alone.points) batches.push_back(batch_of(data, point.samples));
  const auto step_of = [&](int count, std::size_t size) {
    if (at::get_num_threads() != count) {
      at::set_num_threads(count);
      training.step(batches[size]);  // starts threads, and oneDNN prepares its convolutions anew
    }
    return training.step(batches[size]);
  };
  const Curve curve = measure_in_turn(
      {.threads = threads}, alone, batches.size(), seconds, [&](std::size_t size) { return step_of(1, size); },
      [&](std::size_t size) { return step_of(threads, size); });
  at::set_num_threads(1);
  return curve;
}

Curve measure_device_threads(const Subject& subject, const Datasets& data, const Curve& alone, int devices,
                             double handover, double seconds) {
  Training one(subject), all(subject, devices);
  std::vector<Batch> small, large;
  for (const StepTimes& point : alone.points) {
    if (!small.empty() && point.samples * devices > subject.batch) break;
    small.push_back(batch_of(data, point.samples));
    large.push_back(batch_of(data, point.samples * devices));
  }
  const auto step_of_all = [&](std::size_t size) {
    StepTimes times = all.step(large[size]);
    for (double* const part : {&times.forward, &times.backward, &times.update}) *part = std::max(0.0, *part - handover);
    return times;
  };
  return measure_in_turn(
      {.at_once = devices, .in_one_process = true}, alone, small.size(), seconds,
      [&](std::size_t size) { return one.step(small[size]); }, step_of_all);
}

void scale(StepTimes& times, double factor) {
  for (double* const part : {&times.forward, &times.backward, &times.update}) *part *= factor;
}

void undo_drift(Curve& measured, const Curve& now, const Curve& before) {
  std::vector<double> factors;
  for (const StepTimes& point : now.points)
    factors.push_back(computing(times_for(before, static_cast<double>(point.samples))) / computing(point));
  const double factor = median(factors);
  for (StepTimes& point : measured.points) scale(point, factor);
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
