// SPDX-License-Identifier: Apache-2.0
// Schedules of strategies against what a person computes, on a machine whose figures are round.
#include "lockstep/plan/schedules.h"

#include <gtest/gtest.h>

#include "lockstep/error.h"
#include "lockstep/plan/forecast.h"

namespace lockstep::plan {
namespace {

constexpr double kMega = 1e6;

// Forward takes 1 ms a sample and backward 2, on any number of cores; 8 MB of parameters, of which nothing but messages
// takes time; four equal pieces.
Profile round_profile() {
  Profile profile{.model = "round", .machine = "round", .cores = 4};
  profile.parameter_bytes = 8'000'000;
  profile.tensors = {8e6};
  profile.curves = {{.points = {{.samples = 1, .forward = 1e-3, .backward = 2e-3},
                                {.samples = 64, .forward = 64e-3, .backward = 128e-3}}}};
  profile.modules = {{.name = "first", .forward = 1, .backward = 1, .bytes = 4'000'000},
                     {.name = "second", .forward = 1, .backward = 1, .bytes = 4'000'000}};
  for (const char* name : {"a", "b", "c", "d"})
    profile.pieces.push_back({.name = name, .seconds = 1, .bytes = 2'000'000, .output_bytes = 0});
  profile.copy_speed = {1e18};
  profile.memory_of_rank = {{.bytes = 100e6, .seconds = 1}, {.bytes = 163e6, .seconds = 64}};
  profile.common_bytes = 150e6;
  profile.idle_bytes = 50e6;
  return profile;
}

double step_of(const Profile& profile, const Target& target, const Choice& choice) {
  return forecast(profile, target, choice).step;
}

TEST(Schedules, OneDeviceTakesForwardAndBackward) {
  EXPECT_NEAR(step_of(round_profile(), {.batch = 8}, {.method = Method::kSingle}), 24e-3, 1e-9);
}

TEST(Schedules, RanksOfAMachineShareTheBatchAndTheWaits) {
  Profile profile = round_profile();
  profile.barrier = 1e-3;
  EXPECT_NEAR(step_of(profile, {.devices = 4, .batch = 8}, {.method = Method::kDdp}), 6e-3 + 3e-3, 1e-9);
}

TEST(Schedules, MoreRanksThanCoresTakeTurns) {
  Profile profile = round_profile();
  profile.cores = 2;
  EXPECT_NEAR(step_of(profile, {.devices = 4, .batch = 8}, {.method = Method::kDdp}), 12e-3, 1e-9);
}

// Libraries, parameters and the optimizer's state exist once; a rank's own memory and gradients for each; a batch is divided.
TEST(Schedules, WhatRanksOfAMachineShareIsCountedOnce) {
  const auto memory_of = [](int devices) {
    return forecast(round_profile(), {.devices = devices, .batch = 8}, {.method = Method::kDdp}).memory;
  };
  EXPECT_NEAR(memory_of(1), 150e6 + 83e6 + 8e6 + 8e6 + 8e6, 1);
  EXPECT_NEAR(memory_of(4), 150e6 + 4 * 83e6 + 8e6 + 4 * 8e6 + 8e6, 1);
}

TEST(Schedules, CoresThatHinderEachOtherSlowAllRanks) {
  Profile profile = round_profile();
  profile.cores = 2;
  profile.curves.push_back(profile.curves.front());
  profile.curves.back().at_once = 2;
  for (StepTimes& point : profile.curves.back().points) {
    point.forward *= 1.5;
    point.backward *= 1.5;
  }
  EXPECT_NEAR(step_of(profile, {.devices = 2, .batch = 8}, {.method = Method::kDdp}), 18e-3, 1e-9);
}

// (p-1)/(m+p-1) of the time nobody works.
TEST(Schedules, APipelineHasTheBubbleOfItsFormula) {
  for (const PipelineSchedule order : {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B})
    for (const int micro_batches : {1, 4, 8}) {
      const Choice choice{.method = Method::kPipeline, .order = order, .stages = 4, .micro_batches = micro_batches};
      const double busy = 64 * 3e-3 / 4;  // of a stage
      const double bubble = 3.0 / (micro_batches + 3);
      EXPECT_NEAR(step_of(round_profile(), {.devices = 4, .batch = 64}, choice), busy / (1 - bubble), 1e-6)
          << choice.name();
    }
}

TEST(Schedules, WithoutMicroBatchesStagesWorkOneAfterTheOther) {
  const Choice choice{.method = Method::kPipeline, .order = PipelineSchedule::kNaive, .stages = 4, .micro_batches = 1};
  EXPECT_NEAR(step_of(round_profile(), {.devices = 4, .batch = 64}, choice), 64 * 3e-3, 1e-6);
}

TEST(Schedules, StagesAreCutWhereTheSlowestIsFastest) {
  Profile profile = round_profile();
  profile.pieces[0].seconds = 3;
  const std::vector<std::vector<int>> expected{{0}, {1, 2, 3}};
  EXPECT_EQ(stages_of(profile, 2), expected);
}

// Every machine sends 2(n-1)/n of the gradient and receives as much; what backward hides is not waited for.
TEST(Schedules, BetweenMachinesEveryLinkCarriesItsShareOfTheGradient) {
  for (const int machines : {2, 4, 8}) {
    const Target target{.machines = machines, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8};
    const Forecast found = forecast(round_profile(), target, {.method = Method::kDdp});
    const double share = 2.0 * (machines - 1) / machines * 8 * kMega;
    EXPECT_NEAR(found.link_bytes, share, 1);
    const double compute = 3e-3 * 8 / machines;
    EXPECT_NEAR(found.step, compute + share / (1 * kMega), 0.01 * found.step);  // one bucket: nothing overlaps
  }
}

TEST(Schedules, SmallerBucketsHideTheirExchangeBehindBackward) {
  const Target target{.machines = 2, .devices = 1, .link_rate = 1000 * kMega, .link_latency = 0, .batch = 16};
  Choice choice{.method = Method::kDdp};
  const double one_bucket = step_of(round_profile(), target, choice);
  choice.bucket_bytes = 4e6;
  const double two_buckets = step_of(round_profile(), target, choice);
  EXPECT_NEAR(one_bucket, 24e-3 + 8e-3, 1e-6);
  EXPECT_NEAR(two_buckets, 24e-3 + 4e-3, 1e-6);  // half of it goes while the other half of backward runs
}

TEST(Schedules, AServerReceivesTheGradientsOfAllWorkers) {
  for (const int machines : {2, 4}) {
    const Target target{.machines = machines, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8};
    const Forecast found = forecast(round_profile(), target, {.method = Method::kStoreSync});
    EXPECT_NEAR(found.link_bytes, (machines - 1) * 8 * kMega, 1);  // the server is on one of the machines
    EXPECT_GT(found.step, (machines - 1) * 8);
  }
}

// Two machines and one bucket: the whole of it goes out and comes in once.
Profile compressing_profile() {
  Profile profile = round_profile();
  profile.compression = {{.kind = "fp16", .sent = 0.5, .encode = 1e-9, .decode = 2e-9},
                         {.kind = "bf16", .sent = 0.5, .encode = 1e-9, .decode = 2e-9},
                         {.kind = "2bit", .sent = 1.0 / 16, .encode = 1e-9, .decode = 2e-9},
                         {.kind = "topk", .sent = 0.02, .encode = 1e-9, .decode = 2e-9},
                         {.kind = "powersgd", .sent = 0.03, .encode = 1e-9, .decode = 3e-9}};
  return profile;
}

TEST(Schedules, CompressionSendsLessAndComputesMore) {
  const Target target{.machines = 2, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 16};
  const auto forecast_of = [&](Compression kind) {
    return forecast(compressing_profile(), target, {.method = Method::kDdp, .compression = kind});
  };
  const double compute = 24e-3, encode = 8e-3;  // of 8 MB
  const Forecast half = forecast_of(Compression::kBFloat16);
  EXPECT_NEAR(half.link_bytes, 4e6, 1);
  EXPECT_NEAR(half.step, compute + encode + 4 + 16e-3, 1e-6);
  const Forecast two_bits = forecast_of(Compression::kTwoBit);
  EXPECT_NEAR(two_bits.link_bytes, 0.5e6, 1);
  EXPECT_NEAR(two_bits.step, compute + encode + 0.5 + 2 * 16e-3, 1e-6);  // a rank decodes what both sent
  const Forecast top = forecast_of(Compression::kTopK);
  EXPECT_NEAR(top.link_bytes, 0.16e6, 1);
  EXPECT_NEAR(top.step, compute + encode + 0.16 + 2 * 16e-3, 1e-6);
  const Forecast products = forecast_of(Compression::kPowerSGD);
  EXPECT_NEAR(products.link_bytes, 0.24e6, 1);
  EXPECT_NEAR(products.step, compute + encode + 0.24 + 24e-3, 1e-6);
}

// Of four machines' ranks each sends its part to three others, whatever the number of ranks on a machine.
TEST(Schedules, GatheredGradientsGrowWithTheNumberOfRanks) {
  const Target target{.machines = 4, .devices = 2, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8};
  const Choice choice{.method = Method::kDdp, .compression = Compression::kTwoBit};
  EXPECT_NEAR(forecast(compressing_profile(), target, choice).link_bytes, 3 * 2 * 0.5e6, 1);
}

TEST(Schedules, TwoBitsMakePushesSmallAndLeavePullsAsTheyAre) {
  const Target target{.machines = 2, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8};
  Choice choice{.method = Method::kStoreSync};
  const auto sent = [&](const Choice& of) { return schedule(compressing_profile(), target, of, 1).sent_bytes; };
  EXPECT_NEAR(sent(choice), 8e6, 1);
  choice.compression = Compression::kTwoBit;
  EXPECT_NEAR(sent(choice), 8e6, 1);  // from the server, as before; to it only half a megabyte
  EXPECT_LT(step_of(compressing_profile(), target, choice),
            step_of(compressing_profile(), target, {.method = Method::kStoreSync}) - 0.3);
}

TEST(Schedules, WhatIsCompressedIsRankedButNotRecommendedUnlessAskedFor) {
  const Target target{.machines = 2, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 16};
  Profile profile = compressing_profile();
  profile.pieces.clear();  // a pipeline would send nothing here
  const auto all = forecast_all(profile, target);
  EXPECT_TRUE(best_of(all).choice.exact());
  const Choice best = best_of(all, /*inexact=*/true).choice;
  EXPECT_FALSE(best.exact());
  EXPECT_LT(best_of(all, true).step, best_of(all).step);
  EXPECT_THROW(forecast(compressing_profile(), {.devices = 2, .batch = 16},
                        {.method = Method::kDdp, .compression = Compression::kBFloat16}),
               UsageError);
  EXPECT_THROW(forecast(round_profile(), target, {.method = Method::kDdp, .compression = Compression::kBFloat16}),
               UsageError);
}

// With s = 0 a worker reads, computes and updates before the next one may read; with s = 1 two do so at the same time.
TEST(Schedules, WorkersOfABoundedStoreTakeTurnsWithoutStaleness) {
  const Target target{.devices = 2, .batch = 2};
  const auto bounded = [&](int staleness) {
    return step_of(round_profile(), target, {.method = Method::kStoreBounded, .staleness = staleness});
  };
  EXPECT_NEAR(bounded(0), 2 * 3e-3, 0.3e-3);  // nobody waits for the last read of all
  EXPECT_NEAR(bounded(1), 3e-3, 1e-9);
  EXPECT_NEAR(bounded(8), step_of(round_profile(), target, {.method = Method::kStoreAsync}), 1e-9);
}

// Four workers, of which at most two may hold a gradient.
TEST(Schedules, ABoundBelowTheNumberOfWorkersKeepsSomeWaiting) {
  const Choice choice{.method = Method::kStoreBounded, .staleness = 1};
  EXPECT_NEAR(step_of(round_profile(), {.devices = 4, .batch = 4}, choice), 2 * 3e-3, 0.3e-3);
}

TEST(Schedules, SeveralServersAreComparedUnlessTheirNumberIsGiven) {
  const auto servers_of = [](const Target& target) {
    std::vector<int> servers;
    for (const Choice& choice : choices_for(target, 0, 8e6))
      if (choice.method == Method::kStoreSync && choice.exact()) servers.push_back(choice.servers);
    return servers;
  };
  EXPECT_EQ(servers_of({.devices = 2, .batch = 8}), (std::vector{1}));
  EXPECT_EQ(servers_of({.machines = 4, .batch = 8}), (std::vector{1, 2, 4}));
  EXPECT_EQ(servers_of({.machines = 12, .batch = 12}), (std::vector{1, 2, 4, 8, 12}));
  EXPECT_EQ(servers_of({.machines = 4, .batch = 8, .servers = 3}), (std::vector{3}));
}

TEST(Schedules, AveragingEveryFewStepsSendsAsManyTimesLess) {
  const Target target{.machines = 2, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8};
  const Forecast often = forecast(round_profile(), target, {.method = Method::kAveraging, .average_every = 1});
  const Forecast seldom = forecast(round_profile(), target, {.method = Method::kAveraging, .average_every = 8});
  EXPECT_NEAR(often.link_bytes, 8 * seldom.link_bytes, 1);
}

TEST(Schedules, RefuseTargetsThatCannotBe) {
  const Profile profile = round_profile();
  EXPECT_THROW(forecast_all(profile, {.devices = 0, .batch = 8}), UsageError);
  EXPECT_THROW(forecast_all(profile, {.machines = 0, .batch = 8}), UsageError);
  EXPECT_THROW(forecast_all(profile, {.machines = 2, .link_rate = 0, .batch = 8}), UsageError);
  EXPECT_THROW(forecast_all(profile, {.devices = 16, .batch = 8}), UsageError);
  EXPECT_THROW(forecast(profile, {.machines = 2, .batch = 8}, {.method = Method::kTowers}), UsageError);
  const Choice many{.method = Method::kPipeline, .stages = 8};
  EXPECT_THROW(forecast(profile, {.devices = 8, .batch = 8}, many), UsageError);
}

TEST(Schedules, TheFastestOfThoseThatComputeTheSameIsChosen) {
  const auto all = forecast_all(round_profile(), {.devices = 2, .batch = 8});
  EXPECT_TRUE(best_of(all).choice.exact());
  for (std::size_t i = 1; i < all.size(); ++i) EXPECT_LE(all[i - 1].step, all[i].step);
  EXPECT_NE(reason(all).find(best_of(all).choice.name()), std::string::npos);
}

TEST(Schedules, ATimelineHasARowForEachDeviceAndNoOverlapInIt) {
  const auto recordings = timeline_of(round_profile(), {.devices = 2, .batch = 8}, {.method = Method::kDdp});
  ASSERT_EQ(recordings.size(), 2U);
  for (const trace::Recording& recording : recordings) {
    ASSERT_FALSE(recording.spans.empty());
    for (std::size_t i = 1; i < recording.spans.size(); ++i)
      EXPECT_GE(recording.spans[i].begin, recording.spans[i - 1].end);
  }
}

}  // namespace
}  // namespace lockstep::plan
