// SPDX-License-Identifier: Apache-2.0
// Training of which one rank stands still while it lives: the launcher names it and shows where it is.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <fstream>
#include <vector>

#include "agent/clusters/environment.h"
#include "tests/launch/child.h"
#include "tests/shm/support.h"
#include "tests/train/command.h"

namespace lockstep::testing {
namespace {

constexpr int kTimeout = 2 * LOCKSTEP_TEST_PATIENCE;  // seconds
constexpr std::chrono::seconds kLong{60 * LOCKSTEP_TEST_PATIENCE};

Words training(int timeout) {
  return {MISBEHAVING_TASK,
          "--ranks",
          "2",
          "--threads",
          "1",
          "--batch-size",
          "24",
          "--epochs",
          "1000",
          "--quiet",
          "--hang-timeout",
          std::to_string(timeout)};
}

const Words kTraining = training(kTimeout);

// The processes that `parent` has started, with these names; all if there are none.
std::vector<int> children_of(int parent, const Words& names = {}) {
  std::ifstream children("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children");
  std::vector<int> found;
  for (int pid = 0; children >> pid;) {
    std::string name;
    std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/comm"), name);
    if (names.empty() || std::ranges::count(names, name) > 0) found.push_back(pid);
  }
  return found;
}

int pid_of_rank_1(int parent) {  // 0: not there yet
  const std::vector<int> found = children_of(parent, {"lockstep-r1"});
  return found.empty() ? 0 : found.front();
}

TEST(Hang, names_the_rank_that_computes_for_ever_and_shows_its_stack) {
  const Ended ended = run(with_variables({{"MISBEHAVE", "hang"}}, kTraining), kLong);
  EXPECT_EQ(ended.exit_code, 128 + SIGKILL);
  EXPECT_TRUE(contains(ended.error, "rank 1 holds up the others"));
  EXPECT_TRUE(contains(ended.error, ", in forward of step "));
  EXPECT_TRUE(contains(ended.error, "SpoiltReLU"));             // of the stack of rank 1
  EXPECT_TRUE(contains(ended.error, ", waits for rank 1\n"));   // rank 0
  EXPECT_TRUE(contains(ended.error, "lockstep::shm::Waiter"));  // its stack
  EXPECT_TRUE(contains(ended.error, "RankFailed: rank 1 has not moved for "));
}

TEST(Hang, names_a_rank_that_is_stopped) {
  const TempFolder folder;
  Child job(kTraining + Words{"--metrics", folder.file("metrics.jsonl")});
  ASSERT_TRUE(wait_until([&] { return steps_in(folder.file("metrics.jsonl")) >= 10; }, kLong)) << job.error();
  const int victim = pid_of_rank_1(job.pid());
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGSTOP);
  EXPECT_EQ(job.wait(kLong), 128 + SIGKILL);
  EXPECT_TRUE(contains(job.error(), "rank 1 is stopped and holds up the others"));
}

TEST(Hang, a_rank_that_is_stopped_is_replaced_while_restarts_are_left) {
  const TempFolder folder;
  const std::string metrics = folder.file("metrics.jsonl");
  Child job(kTraining + Words{"--metrics", metrics, "--max-restarts", "1"});
  ASSERT_TRUE(wait_until([&] { return steps_in(metrics) >= 10; }, kLong)) << job.error();
  const int victim = pid_of_rank_1(job.pid());
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGSTOP);
  ASSERT_TRUE(wait_until([&] { return !is_running(victim); }, kLong)) << job.error();
  const size_t steps = steps_in(metrics);
  EXPECT_TRUE(wait_until([&] { return steps_in(metrics) >= steps + 10; }, kLong)) << job.error();
  EXPECT_TRUE(contains(job.error(), "rank 1 is stopped and holds up the others"));
}

TEST(Hang, a_rank_that_is_stopped_for_a_moment_goes_on) {
  constexpr int kLongTimeout = 30 * LOCKSTEP_TEST_PATIENCE;
  const TempFolder folder;
  const std::string metrics = folder.file("metrics.jsonl");
  Child job(training(kLongTimeout) + Words{"--metrics", metrics});
  ASSERT_TRUE(wait_until([&] { return steps_in(metrics) >= 10; }, kLong)) << job.error();
  const int victim = pid_of_rank_1(job.pid());
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // the launcher looks at its ranks every second
  ::kill(victim, SIGCONT);
  const size_t steps = steps_in(metrics);
  EXPECT_TRUE(wait_until([&] { return steps_in(metrics) >= steps + 10; }, kLong)) << job.error();
  EXPECT_EQ(job.error(), "");
  job.signal(SIGINT);
  EXPECT_NE(job.wait(kLong), -1);
}

// As `scontrol suspend` does it: for longer than the timeout.
TEST(Hang, a_job_that_is_suspended_as_a_whole_goes_on) {
  const TempFolder folder;
  const std::string metrics = folder.file("metrics.jsonl");
  Child job(kTraining + Words{"--metrics", metrics});
  ASSERT_TRUE(wait_until([&] { return steps_in(metrics) >= 10; }, kLong)) << job.error();
  std::vector<int> all = children_of(job.pid());
  ASSERT_GE(all.size(), 2);
  all.push_back(job.pid());
  for (const int pid : all) ::kill(pid, SIGSTOP);
  const size_t before = steps_in(metrics);
  std::this_thread::sleep_for(std::chrono::seconds(2 * kTimeout));  // the time itself is what is tested here
  EXPECT_EQ(steps_in(metrics), before);
  for (const int pid : all) ::kill(pid, SIGCONT);
  EXPECT_TRUE(wait_until([&] { return steps_in(metrics) >= before + 10; }, kLong)) << job.error();
  EXPECT_EQ(job.error(), "");
  job.signal(SIGINT);
  EXPECT_NE(job.wait(kLong), -1);
}

}  // namespace
}  // namespace lockstep::testing
