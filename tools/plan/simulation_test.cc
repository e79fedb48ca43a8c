// SPDX-License-Identifier: Apache-2.0
// Schedules that a person can compute.
#include "tools/plan/simulation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lockstep/error.h"

namespace lockstep::plan {
namespace {

constexpr double kNear = 1e-9;

TEST(Simulation, ChainTakesTheSumOfItsActivities) {
  Simulation simulation;
  const int cores = simulation.add(Resource{"cores", {2.0}});
  const int first = simulation.add(Activity{.name = "first", .work = 4, .uses = {cores}});
  const int second =
      simulation.add(Activity{.name = "second", .delay = 0.5, .work = 2, .uses = {cores}, .after = {first}});
  const Outcome outcome = simulation.run();
  EXPECT_NEAR(outcome.activities[first].end, 2, kNear);
  EXPECT_NEAR(outcome.activities[second].begin, 2, kNear);
  EXPECT_NEAR(outcome.end, 3.5, kNear);
}

TEST(Simulation, TwoActivitiesShareOneResource) {
  Simulation simulation;
  const int link = simulation.add(Resource{"link", {10.0}});
  const int small = simulation.add(Activity{.name = "small", .work = 10, .uses = {link}});
  const int large = simulation.add(Activity{.name = "large", .work = 30, .uses = {link}});
  const Outcome outcome = simulation.run();
  EXPECT_NEAR(outcome.activities[small].end, 2, kNear);  // 5 units per second each
  EXPECT_NEAR(outcome.activities[large].end, 4, kNear);  // then 20 that are left, at 10
}

TEST(Simulation, MoreUsersMayGetMoreOutOfAResource) {
  Simulation simulation;
  const int cores = simulation.add(Resource{"cores", {1.0, 1.6}});  // two cores that hinder each other
  for (int i = 0; i < 4; ++i) simulation.add(Activity{.name = "rank", .work = 1, .uses = {cores}});
  EXPECT_NEAR(simulation.run().end, 4 / 1.6, kNear);
}

TEST(Simulation, WorkOnDifferentResourcesOverlaps) {
  Simulation simulation;
  const int cores = simulation.add(Resource{"cores", {1.0}});
  const int link = simulation.add(Resource{"link", {1.0}});
  const int first = simulation.add(Activity{.name = "backward 1", .work = 3, .uses = {cores}});
  simulation.add(Activity{.name = "backward 2", .work = 3, .uses = {cores}, .after = {first}});
  simulation.add(Activity{.name = "bucket 1", .work = 2, .uses = {link}, .after = {first}});
  EXPECT_NEAR(simulation.run().end, 6, kNear);
}

TEST(Simulation, IncastWaitsForTheReceiversLink) {
  Simulation simulation;
  const int in = simulation.add(Resource{"into the server", {100.0}});
  for (int worker = 0; worker < 4; ++worker) {
    const int out = simulation.add(Resource{"out", {100.0}});
    simulation.add(Activity{.name = "push", .work = 100, .uses = {out, in}});
  }
  EXPECT_NEAR(simulation.run().end, 4, kNear);
}

TEST(Simulation, WhatOneLinkLeavesOverGoesToTheOthers) {
  Simulation simulation;
  const int out = simulation.add(Resource{"out", {100.0}});
  const int slow = simulation.add(Resource{"slow", {10.0}});
  const int fast = simulation.add(Resource{"fast", {100.0}});
  simulation.add(Activity{.name = "to slow", .work = 10, .uses = {out, slow}});
  const int to_fast = simulation.add(Activity{.name = "to fast", .work = 90, .uses = {out, fast}});
  EXPECT_NEAR(simulation.run().activities[to_fast].end, 1, kNear);
}

TEST(Simulation, RefusesWhatCannotBe) {
  Simulation waits;
  waits.add(Activity{.name = "a", .after = {1}});
  waits.add(Activity{.name = "b", .after = {0}});
  EXPECT_THROW(waits.run(), UsageError);
  for (const double no_number : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    Simulation odd;
    odd.add(Activity{.name = "delay", .delay = no_number});
    EXPECT_THROW(odd.run(), UsageError) << no_number;
  }
  Simulation still;
  still.add(Resource{"link", {0.0}});
  EXPECT_THROW(still.run(), UsageError);
}

}  // namespace
}  // namespace lockstep::plan
