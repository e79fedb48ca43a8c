// SPDX-License-Identifier: Apache-2.0
// Training of which one rank stands still while it lives: the launcher names it and shows where it is.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>

#include "lockstep/launch/environment.h"
#include "tests/launch/child.h"
#include "tests/shm/support.h"
#include "tests/train/command.h"

namespace lockstep::testing {
namespace {

constexpr int kTimeout = 2 * LOCKSTEP_TEST_PATIENCE;  // seconds
constexpr std::chrono::seconds kLong{60 * LOCKSTEP_TEST_PATIENCE};

const Words kTraining = {MISBEHAVING_TASK,
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
                         std::to_string(kTimeout)};

// Of the processes that `parent` has started, the one that is rank 1; 0: not there yet.
int pid_of_rank_1(int parent) {
  std::ifstream children("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children");
  for (int pid = 0; children >> pid;) {
    std::string name;
    std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/comm"), name);
    if (name == "lockstep-r1") return pid;
  }
  return 0;
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
  const std::size_t steps = steps_in(metrics);
  EXPECT_TRUE(wait_until([&] { return steps_in(metrics) >= steps + 10; }, kLong)) << job.error();
  EXPECT_TRUE(contains(job.error(), "rank 1 is stopped and holds up the others"));
}

TEST(Hang, a_rank_that_is_stopped_for_a_moment_goes_on) {
  const TempFolder folder;
  const std::string metrics = folder.file("metrics.jsonl");
  Child job(kTraining + Words{"--metrics", metrics});
  ASSERT_TRUE(wait_until([&] { return steps_in(metrics) >= 10; }, kLong)) << job.error();
  const int victim = pid_of_rank_1(job.pid());
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::seconds(kTimeout) / 4);
  ::kill(victim, SIGCONT);
  const std::size_t steps = steps_in(metrics);
  EXPECT_TRUE(wait_until([&] { return steps_in(metrics) >= steps + 10; }, kLong)) << job.error();
  EXPECT_EQ(job.error(), "");
  job.signal(SIGINT);
  EXPECT_NE(job.wait(kLong), -1);
}

}  // namespace
}  // namespace lockstep::testing
