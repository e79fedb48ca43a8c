// SPDX-License-Identifier: Apache-2.0
// Programs with a loop of their own that do what few programs do, as processes: exit codes and messages.
#include "tests/launch/child.h"
#include "tests/train/command.h"
#include "tests/train/ranks.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Ended;
using testing::Ranks;
using testing::run;
using testing::with_variables;
using testing::Words;

constexpr std::chrono::seconds kLong{200};

Ended run_loop(const std::string& habit, std::map<std::string, std::string> more = {}) {
  more["HABIT"] = habit;
  more["ASAN_OPTIONS"] = "detect_leaks=0";  // a forked child leaves its copies alone
  return run(with_variables(more, {LOCKSTEP_COMMAND, "run", "--nproc-per-node", "2", "--", UNUSUAL_LOOP}), kLong);
}

class UnusualLoop : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Habits, UnusualLoop,
                         ::testing::Values("", "global", "all_global", "fork", "fork_collective", "fork_parallel"),
                         [](const auto& test) {
                           const std::string habit = test.param;
                           return habit.empty() ? "none" : habit;
                         });

TEST_P(UnusualLoop, trains_to_its_end_and_exits_with_0) {
  const Ended ended = run_loop(GetParam());
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_TRUE(contains(ended.output, "[rank 0] trained"));
  EXPECT_TRUE(contains(ended.output, "[rank 1] trained"));
  EXPECT_EQ(ended.output.find("the child ended with"), std::string::npos) << ended.output << ended.error;
}

// ---- LOCKSTEP_CHECK

class CheckedLoop : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Habits, CheckedLoop,
                         ::testing::Values("", "global", "all_global", "fork", "write_allowed", "separate", "threads"),
                         [](const auto& test) {
                           const std::string habit = test.param;
                           return habit.empty() ? "none" : habit;
                         });

TEST_P(CheckedLoop, that_is_right_trains_to_its_end) {
  for (const char* every : {"1", "3"}) {
    const Ended ended = run_loop(GetParam(), {{"LOCKSTEP_CHECK", every}});
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    EXPECT_TRUE(contains(ended.output, "[rank 1] trained"));
  }
}

std::map<std::string, std::string> checked(const std::string& habit) {
  return {{"HABIT", habit}, {"LOCKSTEP_CHECK", "1"}};
}

// The line that wrote stops, and the other rank hears of it.
void expect_stopped(const std::string& habit, const std::string& message, const std::string& phase) {
  Ranks ranks(2, {UNUSUAL_LOOP}, checked(habit));
  EXPECT_NE(ranks[1].wait(kLong), 0);
  EXPECT_TRUE(contains(ranks[1].error(), message));
  EXPECT_TRUE(contains(ranks[1].error(), phase));
  EXPECT_TRUE(contains(ranks[1].error(), "unusual_loop("));  // the backtrace
  EXPECT_NE(ranks[0].wait(kLong), 0);
  EXPECT_TRUE(contains(ranks[0].error(), "PeerLost: rank 1"));
}

TEST(LockstepCheck, stops_the_line_that_writes_one_element_of_a_shared_parameter) {
  expect_stopped("write_parameter", "lockstep: parameter 2.bias was written outside step()",
                 "after step() and before backward()");
}

TEST(LockstepCheck, stops_the_line_that_writes_one_element_of_a_published_gradient) {
  expect_stopped("write_gradient", "lockstep: the gradient of 2.bias was written after backward() had published it",
                 "between backward() and step()");
}

TEST(LockstepCheck, stops_a_write_among_ranks_that_are_threads) {
  const Ended ended = run(with_variables(checked("threads_write"), {UNUSUAL_LOOP}), kLong);
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.error, "lockstep: parameter 2.bias was written outside step()"));
}

TEST(LockstepCheck, names_on_every_rank_a_parameter_that_differs_and_the_ranks) {
  Ranks ranks(3, {UNUSUAL_LOOP}, checked("separate_write"));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_NE(ranks[rank].wait(kLong), 0);
    EXPECT_TRUE(contains(ranks[rank].error(), "parameter 2.bias is not the same on ranks 0, 2 and on ranks 1"));
  }
}

TEST(LockstepCheck, refuses_what_is_not_a_number) {
  const Ended ended = run_loop("", {{"LOCKSTEP_CHECK", "yes"}});
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.error, "LOCKSTEP_CHECK is \"yes\", not a number"));
}

TEST(LockstepCheck, refuses_ranks_that_were_told_different_numbers) {
  const auto script = std::string("LOCKSTEP_CHECK=$RANK exec ") + UNUSUAL_LOOP;
  Ranks ranks(2, {"/bin/sh", "-c", script}, {});
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_NE(ranks[rank].wait(kLong), 0);
    EXPECT_TRUE(contains(ranks[rank].error(), "LOCKSTEP_CHECK is not the same on ranks 0 and on ranks 1"));
  }
}

}  // namespace
}  // namespace lockstep
