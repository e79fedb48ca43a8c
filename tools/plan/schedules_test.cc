// SPDX-License-Identifier: Apache-2.0
// Schedules of strategies against what a person computes, on a machine whose figures are round.
#include "tools/plan/schedules.h"

#include <gtest/gtest.h>

#include <map>

#include "lockstep/error.h"
#include "tools/plan/builder.h"
#include "tools/plan/forecast.h"

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
  for (const char* name : {"a", "b", "c", "d"})
    profile.pieces.push_back({.name = name, .seconds = 1, .bytes = 2'000'000, .output_bytes = 0});
  profile.copy_speed = 1e18;
  profile.memory_of_rank = {{.samples = 1, .bytes = 100e6}, {.samples = 64, .bytes = 163e6}};
  profile.common_bytes = 150e6;
  profile.idle_bytes = 50e6;
  return profile;
}

double step_of(const Profile& profile, const Target& target, const Choice& choice) {
  return forecast(profile, target, choice).step;
}

TEST(Schedules, OneDeviceTakesForwardAndBackward) {
  EXPECT_NEAR(step_of(round_profile(), {.batch = 8}, {.kind = StrategyKind::kSingle}), 24e-3, 1e-9);
}

TEST(Schedules, RanksOfAMachineShareTheBatch) {
  EXPECT_NEAR(step_of(round_profile(), {.devices = 4, .batch = 8}, {.kind = StrategyKind::kDdp}), 6e-3, 1e-9);
}

TEST(Schedules, MoreRanksThanCoresTakeTurns) {
  Profile profile = round_profile();
  profile.cores = 2;
  EXPECT_NEAR(step_of(profile, {.devices = 4, .batch = 8}, {.kind = StrategyKind::kDdp}), 12e-3, 1e-9);
}

// Rank i of more ranks than cores is bound to core i modulo their number.
TEST(Schedules, RanksThatAreBoundToOneCoreTakeTurnsAlsoWhereAnotherIsFree) {
  Profile profile = round_profile();
  profile.cores = 2;
  const Target target{.devices = 4, .batch = 8};
  const Choice choice{.kind = StrategyKind::kDdp};
  for (const auto& [other, expected] : std::map<int, double>{{1, 1}, {2, 2}, {3, 1}}) {
    Builder builder(profile, target, choice);
    builder.compute(0, "forward", 1);
    builder.compute(other, "forward", 1);
    EXPECT_NEAR(builder.take().simulation.run().end, expected, 1e-9) << other;
  }
}

// Libraries, parameters and the optimizer's state exist once; a rank's own memory and gradients for each; a batch is divided.
TEST(Schedules, WhatRanksOfAMachineShareIsCountedOnce) {
  const auto memory_of = [](int devices) {
    return forecast(round_profile(), {.devices = devices, .batch = 8}, {.kind = StrategyKind::kDdp}).memory;
  };
  EXPECT_NEAR(memory_of(1), 150e6 + 83e6 + 8e6 + 8e6 + 8e6, 1);
  EXPECT_NEAR(memory_of(4), 150e6 + 4 * 83e6 + 8e6 + 4 * 8e6 + 8e6, 1);
}

// Four threads are four times as fast as one, so each of two devices, with two threads, is taken to be twice as fast.
TEST(Schedules, ADeviceHasTheThreadsOfItsCores) {
  Profile profile = round_profile();
  profile.curves.push_back(profile.curves.front());
  profile.curves.back().threads = 4;
  for (Curve& curve : profile.curves)
    for (StepTimes& point : curve.points) {
      const double faster = curve.threads;
      point.update = 4e-3 / faster;
      point.forward /= faster;
      point.backward /= faster;
    }
  const auto step = [&](int devices) {
    return step_of(profile, {.devices = devices, .batch = 8},
                   {.kind = devices == 1 ? StrategyKind::kSingle : StrategyKind::kTowers});
  };
  EXPECT_NEAR(step(1), 24e-3 / 4 + 1e-3, 1e-9);
  EXPECT_NEAR(step(2), 12e-3 / 2 + 2e-3, 1e-9);
  EXPECT_NEAR(step(4), 6e-3 + 4e-3, 1e-9);
}

// The machine of the profile has two cores, where two ranks hinder each other; so will sixteen on sixteen, as far as is known.
TEST(Schedules, AMachineWithMoreCoresThanTheProfilesComputesOnAll) {
  Profile profile = round_profile();
  profile.cores = 2;
  profile.curves.push_back(profile.curves.front());
  profile.curves.back().at_once = 2;
  for (StepTimes& point : profile.curves.back().points)
    for (double* const part : {&point.forward, &point.backward}) *part *= 1.5;
  for (Curve& curve : profile.curves)
    for (StepTimes& point : curve.points) point.update = 1e-3;
  const Target target{.devices = 16, .cores = 16, .batch = 16};
  EXPECT_NEAR(step_of(profile, target, {.kind = StrategyKind::kDdp}), 1.5 * (3e-3 + 1e-3 / 16), 1e-9);
}

TEST(Schedules, WhatBoundsAStepIsWhatMostOfItsTimeGoesTo) {
  const auto bound = [](const Target& target) {
    return forecast(round_profile(), target, {.kind = StrategyKind::kDdp}).bound;
  };
  EXPECT_EQ(bound({.devices = 4, .batch = 8}), "computing 100 %");
  const std::string slow = bound({.machines = 2, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8});
  EXPECT_EQ(slow.substr(0, 4), "link");
  Profile profile = round_profile();
  const Target far{.machines = 2, .link_rate = 1e14, .link_latency = 1, .batch = 8};
  EXPECT_EQ(
      forecast(profile, far, {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync}).bound.substr(0, 7),
      "waiting");
  profile.curves.front().points[0].update = profile.curves.front().points[1].update = 1;
  EXPECT_EQ(forecast(profile, {.devices = 4, .batch = 8}, {.kind = StrategyKind::kDdp}).bound.substr(0, 6), "memory");
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
  EXPECT_NEAR(step_of(profile, {.devices = 2, .batch = 8}, {.kind = StrategyKind::kDdp}), 18e-3, 1e-9);
}

// (p-1)/(m+p-1) of the time nobody works.
TEST(Schedules, APipelineHasTheBubbleOfItsFormula) {
  for (const PipelineSchedule order : {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B})
    for (const int micro_batches : {1, 4, 8}) {
      const Choice choice{.kind = StrategyKind::kPipeline, .order = order, .stages = 4, .micro_batches = micro_batches};
      const double busy = 64 * 3e-3 / 4;  // of a stage
      const double bubble = 3.0 / (micro_batches + 3);
      EXPECT_NEAR(step_of(round_profile(), {.devices = 4, .batch = 64}, choice), busy / (1 - bubble), 1e-6)
          << choice.name();
    }
}

TEST(Schedules, WithoutMicroBatchesStagesWorkOneAfterTheOther) {
  const Choice choice{
      .kind = StrategyKind::kPipeline, .order = PipelineSchedule::kNaive, .stages = 4, .micro_batches = 1};
  EXPECT_NEAR(step_of(round_profile(), {.devices = 4, .batch = 64}, choice), 64 * 3e-3, 1e-6);
}

TEST(Schedules, StagesAreCutWhereTheSlowestIsFastest) {
  Profile profile = round_profile();
  profile.pieces[0].seconds = 3;
  const IntVector<Ids> expected{{0}, {1, 2, 3}};
  EXPECT_EQ(stages_of(profile, 2), expected);
}

// Bytes on a link for each byte of a long message: a segment has 1448 of 1514, and every second one is acknowledged.
constexpr double kOnLinks = (1514.0 + 66.0 / 2) / 1448;

// To one of the other machines and from it, one message each way.
double both_ways(double bytes) { return bytes_on_wire(bytes).there + bytes_on_wire(bytes).back; }

// Every machine sends 2(n-1)/n of the gradient and receives as much, in eight chunks, each in parts for all others; and one
// signature. One bucket: nothing overlaps.
TEST(Schedules, BetweenMachinesEveryLinkCarriesItsShareOfTheGradient) {
  for (const int machines : {2, 4, 8}) {
    const Target target{.machines = machines, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8};
    const Forecast found = forecast(round_profile(), target, {.kind = StrategyKind::kDdp});
    const double chunk = machines == 2 ? both_ways(1e6) : 2 * (machines - 1) * both_ways(1e6 / machines);
    const double expected = 8 * chunk + both_ways(24);
    EXPECT_NEAR(found.link_bytes, expected, 1);
    EXPECT_NEAR(found.link_bytes, 2.0 * (machines - 1) / machines * 8 * kMega * kOnLinks, 0.01 * expected);
    const double compute = 3e-3 * 8 / machines;
    EXPECT_NEAR(found.step, compute + expected / (1 * kMega), 0.01 * found.step);
  }
}

TEST(Schedules, AllBucketsButTheLastHideTheirExchangeBehindBackward) {
  Profile profile = round_profile();
  profile.parameter_bytes = 2 * kCpuBucketBytes;
  const Target target{.machines = 2, .devices = 1, .link_rate = 5000 * kMega, .link_latency = 0, .batch = 16};
  const double half_of_backward = 8e-3, exchange = both_ways(kCpuBucketBytes) / (5000 * kMega);
  ASSERT_LT(exchange, half_of_backward);
  EXPECT_NEAR(step_of(profile, target, {.kind = StrategyKind::kDdp}), 24e-3 + exchange, 1e-4);
}

TEST(Schedules, AServerReceivesTheGradientsOfAllWorkers) {
  for (const int machines : {2, 4}) {
    const Target target{.machines = machines, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8};
    const Forecast found =
        forecast(round_profile(), target, {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync});
    const double gradients = (machines - 1) * 8 * kMega * kOnLinks;  // the server is on one of the machines
    EXPECT_NEAR(found.link_bytes, gradients, 0.01 * gradients);
    EXPECT_GT(found.step, (machines - 1) * 8);
  }
}

TEST(Schedules, SeveralServersAreComparedUnlessTheirNumberIsGiven) {
  const auto servers_of = [](const Target& target) {
    std::vector<int> servers;
    for (const Choice& choice : choices_for(target, 0))
      if (choice.store == KVStoreKind::kDistSync && choice.exact()) servers.push_back(choice.servers);
    return servers;
  };
  EXPECT_EQ(servers_of({.devices = 2, .batch = 8}), (std::vector{1}));
  EXPECT_EQ(servers_of({.machines = 4, .batch = 8}), (std::vector{1, 2, 4}));
  EXPECT_EQ(servers_of({.machines = 12, .batch = 12}), (std::vector{1, 2, 4, 8, 12}));
  EXPECT_EQ(servers_of({.machines = 4, .batch = 8, .servers = 3}), (std::vector{3}));
}

// The second server has only the small key.
TEST(Schedules, AKeyThatIsNotSplitBelongsToOneServer) {
  Profile profile = round_profile();
  profile.tensors = {3e6, 1e6};
  profile.parameter_bytes = 4'000'000;
  const Target target{.machines = 2, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8, .servers = 2};
  const Forecast found =
      forecast(profile, target, {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync, .servers = 2});
  // Machine 0 receives the other worker's 3 MB for its server, and 1 MB of new weights from the other server.
  EXPECT_NEAR(found.link_bytes, 4e6 * kOnLinks, 0.01 * 4e6);
  EXPECT_NEAR(found.step, 12e-3 + 3 * 1.05 * 2, 1.1);  // pushed, then pulled, with some overlap
}

// Of two remote workers each gets new values when its next megabyte has arrived.
TEST(Schedules, AWorkerGetsAPartWhenItsNextOneHasArrived) {
  Profile profile = round_profile();
  profile.tensors = {1e6, 1e6};
  profile.parameter_bytes = 2'000'000;
  const Target target{.machines = 3, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 9};
  EXPECT_NEAR(step_of(profile, target, {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync}),
              9e-3 + (4 + 4) * bytes_on_wire(1e6).there / kMega, 0.03);
}

// A stage asks for the next activations behind the gradients that it sends, on one connection: so the two directions take turns.
TEST(Schedules, WhatAStageAsksForGoesBehindWhatItSends) {
  Profile profile = round_profile();
  for (PieceTimes& piece : profile.pieces) piece.output_bytes = 1e6;
  const Target target{.machines = 2, .link_rate = 1 * kMega, .link_latency = 0, .batch = 4};
  const Choice choice{.kind = StrategyKind::kPipeline, .stages = 2, .micro_batches = 4};
  const double message = bytes_on_wire(1e6).there / kMega;
  EXPECT_NEAR(step_of(profile, target, choice), 8 * message, 0.05);
}

TEST(Schedules, AveragingEveryFewStepsSendsAsManyTimesLess) {
  const Target target{.machines = 2, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8};
  const Forecast often =
      forecast(round_profile(), target, {.kind = StrategyKind::kAveraging, .averaging = {.every = 1}});
  const Forecast seldom =
      forecast(round_profile(), target, {.kind = StrategyKind::kAveraging, .averaging = {.every = 8}});
  EXPECT_NEAR(often.link_bytes, 8 * seldom.link_bytes, 0.01 * often.link_bytes);  // but for the loss of each batch
}

Choice averaging_with(const AveragingOptions& options) {
  return {.kind = StrategyKind::kAveraging, .averaging = options};
}

TEST(Schedules, AveragingInInt8SendsAByteForANumberToEachOtherMachine) {
  for (const int machines : {2, 4}) {
    const Target target{.machines = machines, .devices = 1, .link_rate = 1 * kMega, .link_latency = 0, .batch = 8};
    const double sent = (machines - 1) * both_ways(2e6 + 2e6 / 1024);
    for (const int64_t parts : {1, 4}) {
      const Choice choice = averaging_with({.every = 8, .parts = parts, .in = AverageIn::kInt8});
      EXPECT_NEAR(8 * forecast(round_profile(), target, choice).link_bytes, sent, 0.01 * sent) << machines;
    }
  }
}

// A step computes for 12 ms. All parts together are on the link for 86 ms.
TEST(Schedules, AveragingInTheBackgroundTakesWhatTheDelayDoesNotHide) {
  const Target target{.machines = 2, .devices = 1, .link_rate = 100 * kMega, .link_latency = 0, .batch = 8};
  const double step = 12e-3, transfer = 8 * both_ways(1e6) / (100 * kMega);
  const auto round_of = [&](const AveragingOptions& options) {
    return 8 * step_of(round_profile(), target, averaging_with(options));
  };
  for (const int64_t delay : {0, 1, 4, 8})
    EXPECT_NEAR(round_of({.every = 8, .delay = delay}),
                8 * step + std::max(0.0, transfer - static_cast<double>(delay) * step), 2e-3)
        << delay;
  EXPECT_NEAR(round_of({.every = 8, .parts = 4, .delay = 1}), 8 * step + 4 * (transfer / 4 - step), 2e-3);
  EXPECT_NEAR(round_of({.every = 8, .parts = 4, .delay = 2}), 8 * step, 2e-3);
}

// Parameters have 8 MB.
TEST(Schedules, AveragingInTheBackgroundKeepsFurtherBlocks) {
  const auto more = [](const Target& target, const AveragingOptions& options) {
    const auto memory = [&](const AveragingOptions& each) {
      return forecast(round_profile(), target, averaging_with(each)).memory;
    };
    return (memory(options) - memory({.every = options.every})) / kMega;
  };
  const Target here{.devices = 2, .batch = 8}, two{.machines = 2, .batch = 8};
  const double anchor = 8, lost = 8;
  EXPECT_NEAR(more(here, {.every = 4, .parts = 2}), 0, 1e-6);
  EXPECT_NEAR(more(here, {.every = 4, .delay = 1}), anchor + 2 * 8, 1e-6);
  EXPECT_NEAR(more(here, {.every = 4, .parts = 2, .delay = 4}), anchor + 4 + 2 * 4, 1e-6);
  EXPECT_NEAR(more(here, {.every = 4, .in = AverageIn::kInt8}), anchor + 2 * 8, 1e-6);
  EXPECT_NEAR(more(two, {.every = 4, .in = AverageIn::kInt8}), anchor + lost + 2 * 2, 1e-6);
}

TEST(Schedules, AveragingIsComparedAsTheTargetSays) {
  Target target{.machines = 2, .link_rate = 1 * kMega, .batch = 8};
  target.averaging = {.parts = 4, .delay = 6, .in = AverageIn::kInt8};
  std::vector<int64_t> every;
  for (const Choice& choice : choices_for(target, 0)) {
    if (choice.kind != StrategyKind::kAveraging) continue;
    EXPECT_FALSE(choice.exact());
    const AveragingOptions options = choice.options({}).averaging;
    EXPECT_EQ(options.parts, 4);
    EXPECT_EQ(options.delay, 6);
    EXPECT_EQ(options.in, AverageIn::kInt8);
    every.push_back(options.every);
  }
  EXPECT_EQ(every, (std::vector<int64_t>{8, 16}));  // a part arrives before it is sent again
  const std::vector<Forecast> all = forecast_all(round_profile(), target);
  const auto fastest = [&](StrategyKind kind) {
    return std::ranges::find_if(all, [=](const Forecast& each) { return each.choice.kind == kind; });
  };
  EXPECT_LT(fastest(StrategyKind::kAveraging), fastest(StrategyKind::kDdp));
  EXPECT_NE(best_of(all).choice.kind, StrategyKind::kAveraging);
}

// ---- What messages between machines take beside the link

Target with_perfect_links(int machines) {
  return {.machines = machines, .link_rate = 1e14, .link_latency = 0, .batch = 8};
}

// A process has a connection to each other one and the first ones of each machine to those of the others; servers are processes, too,
// with two connections to each worker on another machine.
TEST(Schedules, ConnectionsBetweenMachinesTakeMemory) {
  const auto more = [](int machines, const Choice& choice) {
    Profile profile = round_profile();
    const double without = forecast(profile, with_perfect_links(machines), choice).memory;
    profile.connection_bytes = 1e6;
    return machines * (forecast(profile, with_perfect_links(machines), choice).memory - without) / 1e6;
  };
  EXPECT_NEAR(more(4, {.kind = StrategyKind::kDdp}), 4 * (3 + 3), 1e-9);
  EXPECT_NEAR(more(4, {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync, .servers = 1}),
              5 * 4 + 4 * 3 + 2 * 3 * 2, 1e-9);
  EXPECT_NEAR(more(4, {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync, .servers = 4}),
              8 * (7 + 3) + 2 * 12 * 2, 1e-9);
}

// What was measured between two machines comes out again for them; each of four sends a signature, and three messages at
// a time, in one round or two.
TEST(Schedules, MessagesTakeTheCoresOfBothMachinesAsWasMeasured) {
  constexpr double kSmall = 1 << 10, kLarge = 1 << 23;
  Profile profile = round_profile();
  profile.cores = 1;
  const double message = 0.5e-3, byte = 1e-9;
  profile.loopback_work = {{kSmall, 4 * message}, {kLarge, 4 * message + 2 * kLarge * byte}};
  const Choice choice{.kind = StrategyKind::kDdp};
  const auto seconds = [&](int machines, double bytes) {
    const Target target = with_perfect_links(machines);
    Builder builder(profile, target, choice);
    all_reduce(builder, builder.all_devices(), bytes, IntVector<Ids>(machines));
    return builder.take().simulation.run().end;
  };
  EXPECT_NEAR(seconds(2, kSmall), 2 * message, 1e-4);                        // on each machine
  EXPECT_NEAR(seconds(2, kLarge), (1 + 8) * message + kLarge * byte, 1e-4);  // in eight chunks
  EXPECT_NEAR(seconds(4, kSmall), (1 + 3) * message, 1e-4);
  EXPECT_NEAR(seconds(4, kLarge), (1 + 3 * 16) * message + 3 * 2 * kLarge / 4 * byte, 1e-4);
  const Target two = with_perfect_links(2);
  Builder builder(profile, two, choice);
  builder.post(0, 0, 1, "message", 24, {});
  EXPECT_NEAR(builder.take().simulation.run().end, message / 2, 1e-6);  // half of it, at each end
}

// Of two messages of one connection the second one waits for the link, not for the first one's arrival.
TEST(Schedules, AMessageFollowsTheOneBeforeWithoutWaitingForItsArrival) {
  const Choice choice{.kind = StrategyKind::kDdp};
  const Target target{.machines = 2, .link_rate = 1 * kMega, .link_latency = 10, .batch = 8};
  const Profile profile = round_profile();
  Builder builder(profile, target, choice);
  const Builder::Message first = builder.post(0, 0, 1, "first", 1e6, {});
  builder.post(0, 0, 1, "second", 1e6, {first.left});
  EXPECT_NEAR(builder.take().simulation.run().end, 2 * bytes_on_wire(1e6).there / kMega + 10, 1e-6);
}

TEST(Schedules, RefuseTargetsThatCannotBe) {
  const Profile profile = round_profile();
  EXPECT_THROW(forecast_all(profile, {.devices = 0, .batch = 8}), UsageError);
  EXPECT_THROW(forecast_all(profile, {.machines = 0, .batch = 8}), UsageError);
  EXPECT_THROW(forecast_all(profile, {.machines = 2, .link_rate = 0, .batch = 8}), UsageError);
  EXPECT_THROW(forecast_all(profile, {.devices = 16, .batch = 8}), UsageError);
  EXPECT_THROW(forecast_all(profile, {.machines = 65536, .devices = 65536, .batch = 8}), UsageError);
}

TEST(Schedules, TheFastestOfThoseThatComputeTheSameIsChosen) {
  const auto all = forecast_all(round_profile(), {.devices = 2, .batch = 8});
  EXPECT_TRUE(best_of(all).choice.exact());
  for (size_t i = 1; i < all.size(); ++i) EXPECT_LE(all[i - 1].step, all[i].step);
  EXPECT_NE(reason(all).find(best_of(all).choice.name()), std::string::npos);
}

// Four ranks hinder each other by half: 9 ms. One device with four threads takes 24 ms over how much faster these are.
TEST(Schedules, OneProcessWithAllCoresIsChosenWhereItIsFastest) {
  const auto best_where_threads_are = [](double faster) {
    Profile profile = round_profile();
    Curve alone = profile.curves.front(), at_once = alone;
    alone.threads = at_once.at_once = 4;
    for (double StepTimes::*const part : {&StepTimes::forward, &StepTimes::backward}) {
      for (StepTimes& point : alone.points) point.*part /= faster;
      for (StepTimes& point : at_once.points) point.*part *= 1.5;
    }
    profile.curves.insert(profile.curves.end(), {at_once, alone});
    return best_of(forecast_all(profile, {.devices = 4, .batch = 8}));
  };
  const Forecast single = best_where_threads_are(3);
  EXPECT_EQ(single.choice.arguments(4), "--strategy single");
  EXPECT_NEAR(single.step, 8e-3, 1e-9);
  EXPECT_NEAR(single.memory, forecast(round_profile(), {.batch = 8}, single.choice).memory, 1);
  EXPECT_NEAR(best_where_threads_are(2).step, 9e-3, 1e-9);
}

TEST(Schedules, OfChoicesThatAreAboutAsFastTheSimplestIsRecommended) {
  const auto recommended = [](double with_servers, double in_micro_batches) {
    return best_of({{.choice = {.kind = StrategyKind::kPipeline}, .step = in_micro_batches},
                    {.choice = {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync}, .step = with_servers},
                    {.choice = {.kind = StrategyKind::kAveraging, .averaging = {.every = 8}}, .step = 0.5},
                    {.choice = {.kind = StrategyKind::kDdp}, .step = 1}})
        .choice.kind;
  };
  EXPECT_EQ(recommended(0.96, 0.96), StrategyKind::kDdp);
  EXPECT_EQ(recommended(0.94, 1.1), StrategyKind::kKVStore);
  EXPECT_EQ(recommended(0.9, 0.93), StrategyKind::kPipeline);
  EXPECT_EQ(recommended(1.01, 0.9), StrategyKind::kPipeline);
}

TEST(Schedules, ATimelineHasARowForEachDeviceAndNoOverlapInIt) {
  const auto recordings = timeline_of(round_profile(), {.devices = 2, .batch = 8}, {.kind = StrategyKind::kDdp});
  ASSERT_EQ(recordings.size(), 2U);
  for (const trace::Recording& recording : recordings) {
    ASSERT_FALSE(recording.events.empty());
    for (size_t i = 1; i < recording.events.size(); ++i)
      EXPECT_GE(recording.events[i].begin, recording.events[i - 1].end);
  }
}

}  // namespace
}  // namespace lockstep::plan
