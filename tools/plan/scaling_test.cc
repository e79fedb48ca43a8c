// SPDX-License-Identifier: Apache-2.0
// Forecasts for more cores than the profile's against what a person computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "tools/plan/forecast.h"

namespace lockstep::plan {
namespace {

// Two cores: a sample takes 3 ms on one, an update 16 ms, and both take 0.6 of that with two threads. One core copies 1 GB/s.
Profile profile_of_two_cores() {
  Profile profile{.model = "model", .machine = "machine", .cores = 2, .parameter_bytes = 8e6, .tensors = {8e6}};
  profile.curves = {{.points = {{.samples = 1, .forward = 1e-3, .backward = 2e-3, .update = 16e-3},
                                {.samples = 64, .forward = 64e-3, .backward = 128e-3, .update = 16e-3}}}};
  profile.curves.push_back(profile.curves.front());
  profile.curves.back().threads = 2;
  for (StepTimes& point : profile.curves.back().points)
    for (double* const part : {&point.forward, &point.backward, &point.update}) *part *= 0.6;
  profile.copy_speed = 1e9;
  return profile;
}

// Whose memory serves four of its cores.
constexpr Target kSixteenCores{.cores = 16, .batch = 16, .memory_rate = 4e9};

std::vector<Scaled> on_sixteen_cores(StrategyKind kind, int ranks) {
  auto all = forecast_scaling(profile_of_two_cores(), kSixteenCores, {16});
  std::erase_if(
      all, [&](const Scaled& each) { return each.forecast.choice.kind != kind || (ranks > 0 && each.ranks != ranks); });
  return all;
}

void expect_milliseconds(StrategyKind kind, int ranks, double expected) {
  const auto found = on_sixteen_cores(kind, ranks);
  ASSERT_EQ(found.size(), 1U) << ranks;
  EXPECT_EQ(found[0].cores, 16);
  EXPECT_NEAR(found[0].forecast.step * 1e3, expected, 1e-6) << ranks;
}

// A sample for each. Sixteen that read 15/16 of 8 MB, then update a part, take four times as long as one.
TEST(Scaling, RanksOfOneThreadShareTheMemory) { expect_milliseconds(StrategyKind::kDdp, 16, 3 + 4 * 7.5 + 4 * 1); }

// Eight threads need 0.6 ^ 3 of the time of one. The memory allows no update in less than a quarter; one rank takes all of it.
TEST(Scaling, ThreadsGainAsFarAsMemoryAllows) {
  expect_milliseconds(StrategyKind::kDdp, 2, 24 * 0.216 + 2 * 1 + 2 * 16 * 0.25 / 2);
  expect_milliseconds(StrategyKind::kSingle, 1, 48 * 0.1296 + 16 * 0.25);
}

TEST(Scaling, ThreadsGainAtMostTheirNumber) {
  Profile profile = profile_of_two_cores();
  for (StepTimes& point : profile.curves.back().points) point.forward = point.backward = 1e-9;
  const Target target{.cores = 16, .batch = 16, .memory_rate = 1e18};
  EXPECT_NEAR(forecast(profile, target, {.kind = StrategyKind::kSingle}).step, 48e-3 / 16 + 16e-3 * 0.1296, 1e-9);
}

TEST(Scaling, MoreThreadsThanMeasuredGainNothingWhereTheMemoryIsNotKnown) {
  const Target target{.cores = 16, .batch = 16};
  EXPECT_NEAR(forecast(profile_of_two_cores(), target, {.kind = StrategyKind::kSingle}).step, (48e-3 + 16e-3) * 0.6,
              1e-9);
}

TEST(Scaling, OfOtherStrategiesTheFastestDivisionIsShown) {
  for (const StrategyKind kind : {StrategyKind::kDataParallel, StrategyKind::kKVStore, StrategyKind::kTowers}) {
    double fastest = std::numeric_limits<double>::infinity();
    for (const int devices : {2, 4, 8, 16})
      for (const bool update_on_cpu : {false, true}) {
        Target target = kSixteenCores;
        target.devices = devices;
        const Choice choice{.kind = kind, .update_on_cpu = update_on_cpu};
        fastest = std::min(fastest, forecast(profile_of_two_cores(), target, choice).step);
      }
    const auto found = on_sixteen_cores(kind, 0);
    ASSERT_EQ(found.size(), 1U);
    EXPECT_DOUBLE_EQ(found[0].forecast.step, fastest);
  }
}

TEST(Scaling, EveryDivisionHasASampleForEachRank) {
  std::vector<int> ranks;
  for (const Scaled& each : forecast_scaling(profile_of_two_cores(), {.batch = 6, .memory_rate = 4e9}, {12}))
    if (each.forecast.choice.kind == StrategyKind::kDdp) ranks.push_back(each.ranks);
  EXPECT_EQ(ranks, (std::vector{2, 3, 4, 6}));
}

}  // namespace
}  // namespace lockstep::plan
