// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/measured_steps.h"

#include <ATen/Parallel.h>

#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/median.h"

namespace lockstep::plan {
namespace {

constexpr const char* kOwnMemory = "/proc/self/smaps_rollup";
constexpr int kSizes = 6;         // of batches, each twice the one before
constexpr int kFewestRounds = 3;  // over all sizes
constexpr int kUsualRounds = 8;
constexpr int kMostSteps = 40;  // of one size in a round
constexpr std::array kParts{&StepTimes::forward, &StepTimes::backward, &StepTimes::update};

std::vector<int64_t> sizes_up_to(int64_t batch) {
  std::vector<int64_t> sizes;
  for (int i = 0; i < kSizes && (sizes.empty() || sizes.back() > 1); ++i)
    sizes.push_back(std::max<int64_t>(1, batch >> i));
  std::ranges::reverse(sizes);
  return sizes;
}

double reduced(const World& world, double value, ReduceOp op) {
  const Tensor tensor = torch::full({1}, value, torch::kFloat64);
  world.all_reduce(tensor, op);
  return tensor.item<double>();
}

struct Size {
  Batch batch;
  double step = 0;  // seconds of a first one, on the slowest rank
  std::vector<StepTimes> alone{}, at_once{};
};

// Returns the sizes that can be measured in that time, and the memory of a rank for each. A first step of each makes room.
std::vector<Size> try_sizes(const World& world, Training& training, const Datasets& data, int64_t batch, double limit,
                            std::vector<SizedMemory>& memory) {
  std::vector<Size> sizes;
  double all = 0;
  for (const int64_t samples : sizes_up_to(batch)) {
    const double needed = sizes.empty() ? 0 : 2 * sizes.back().step * (1 + 2 * kFewestRounds);
    if (all + needed > limit) break;
    Size size{.batch = batch_of(data, samples)};
    training.step(size.batch);
    size.step = largest_of(world, training.step(size.batch).computing());
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
  for (double StepTimes::*const part : kParts) times.*part = sum_of(world, times.*part) / world.size();
  return times;
}

// Leaves out the tenth that is fastest and the tenth that is slowest.
void add_spread(std::vector<double>& spread, const std::vector<StepTimes>& steps) {
  std::vector<double> seconds;
  for (const StepTimes& each : steps) seconds.push_back(each.computing());
  std::ranges::sort(seconds);
  const double middle = median(seconds);
  const size_t cut = seconds.size() / 10;
  for (size_t i = cut; i < seconds.size() - cut; ++i) spread.push_back(seconds[i] / middle);
}

StepTimes medians(const std::vector<StepTimes>& steps) {
  StepTimes middle{.samples = steps.front().samples};
  for (double StepTimes::*const part : kParts) {
    std::vector<double> values;
    for (const StepTimes& each : steps) values.push_back(each.*part);
    middle.*part = median(values);
  }
  return middle;
}

// Makes up for a machine that was faster or slower when `now` was measured than when `before` was, both of the same thing: by
// one factor, the median over all sizes.
void undo_drift(Curve& measured, const Curve& now, const Curve& before) {
  std::vector<double> factors;
  for (const StepTimes& point : now.points)
    factors.push_back(times_for(before, static_cast<double>(point.samples)).computing() / point.computing());
  const double factor = median(factors);
  for (StepTimes& point : measured.points) scale(point, factor);
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

Batch batch_of(const Datasets& data, int64_t samples) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < samples; ++i) indices.push_back(i % data.train->size());
  return data.train->make_batch(indices);
}

MeasuredSteps measure_steps(const World& world, Training& training, const Datasets& data, int64_t batch,
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

// Steps of `one` come in turn with those of `all`: they say how the machine has drifted since `alone`.
Curve measure_together(const Subject& subject, const Datasets& data, const Curve& alone, Curve kind, double seconds) {
  Training one(subject), all(subject, kind.at_once);
  std::vector<Batch> small, large;
  for (const StepTimes& point : alone.points) {
    if (!small.empty() && point.samples * kind.at_once > subject.batch) break;
    small.push_back(batch_of(data, point.samples));
    large.push_back(batch_of(data, point.samples * kind.at_once));
  }
  const auto step = [](Training& training, const Batch& batch, int threads) {
    if (at::get_num_threads() != threads) {
      at::set_num_threads(threads);
      training.step(batch);  // starts threads, and oneDNN prepares its convolutions anew
    }
    return training.step(batch);
  };
  std::vector<std::vector<StepTimes>> of_one(small.size()), of_all(small.size());
  const Stopwatch watch;
  for (int round = -1; round < kFewestRounds || watch.seconds() < seconds; ++round)
    for (size_t i = 0; i < small.size(); ++i) {
      const StepTimes first = step(one, small[i], 1);
      for (int k = 0; k < 3; ++k) {
        const StepTimes times = step(all, large[i], kind.threads);
        if (round >= 0) of_all[i].push_back(times);  // the first round makes room
      }
      if (round >= 0) of_one[i].push_back(first);
    }
  Curve now;
  for (size_t i = 0; i < small.size(); ++i) {
    now.points.push_back(medians(of_one[i]));
    kind.points.push_back(medians(of_all[i]));
  }
  undo_drift(kind, now, alone);
  at::set_num_threads(1);
  return kind;
}

void scale(StepTimes& times, double factor) {
  for (double StepTimes::*const part : kParts) times.*part *= factor;
}

double own_bytes() { return proc_bytes(kOwnMemory, "Private_Clean:") + proc_bytes(kOwnMemory, "Private_Dirty:"); }

double shared_bytes() { return proc_bytes(kOwnMemory, "Shared_Clean:") + proc_bytes(kOwnMemory, "Shared_Dirty:"); }

double sum_of(const World& world, double value) { return reduced(world, value, ReduceOp::kSum); }

double largest_of(const World& world, double value) { return reduced(world, value, ReduceOp::kMax); }

}  // namespace lockstep::plan
