// SPDX-License-Identifier: Apache-2.0
// Real signals to real runs: all ranks leave after the same step, whichever of them got the signal, with a checkpoint.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "lockstep/base/files/file.h"
#include "lockstep/base/to_size.h"
#include "tests/support.h"
#include "tests/train/ranks.h"

namespace lockstep::testing {
namespace {

constexpr int kStopped = 143;
const Words kTrain = {LOCKSTEP_COMMAND, "train", "--threads", "1",       "--batch-size", "32",
                      "--timeout",      "60",    "--epochs",  "1000000", "--quiet"};

int64_t stopped_after(const std::filesystem::path& metrics) {
  const auto events = metrics_in(metrics);
  return events.back()["event"] == "stop" ? events.back()["step"].get<int64_t>() : -1;
}

std::string checkpoint_of(size_t step) {
  const std::string digits = concat(step);
  return concat("step-", std::string(8 - digits.size(), '0'), digits, ".safetensors");
}

void expect_all_end_with(Ranks& ranks, int code) {
  for (int rank = 0; rank < ranks.count(); ++rank)
    EXPECT_EQ(ranks[rank].wait(), code) << "rank " << rank << ": " << ranks[rank].error();
}

std::string short_name_of(int pid) {
  try {
    return read_file(concat("/proc/", pid, "/comm"));
  } catch (const std::exception&) {
    return "";
  }
}

class StopOf : public ::testing::TestWithParam<Words> {};
INSTANTIATE_TEST_SUITE_P(Strategies, StopOf,
                         ::testing::Values(Words{"--strategy", "ddp"},
                                           Words{"--strategy", "ddp", "--separate-parameters"},
                                           Words{"--strategy", "averaging"}, Words{"--strategy", "pipeline"},
                                           Words{"--strategy", "kvstore", "--kvstore", "dist_sync"}),
                         [](const auto& tested) {
                           std::string name = join(tested.param, "");
                           std::erase(name, '-');
                           return name;
                         });

TEST_P(StopOf, all_ranks_is_after_the_same_step_where_one_got_the_signal) {
  const TempFolder folder;
  Ranks ranks(3, kTrain + GetParam() + Words{"--checkpoint-dir", folder / "checkpoints"});
  ASSERT_TRUE(ranks.have_made(2));
  ranks[2].signal(SIGTERM);
  ranks[2].signal(SIGTERM);
  expect_all_end_with(ranks, kStopped);
  EXPECT_EQ(stopped_after(ranks.metrics()), std::ssize(ranks.losses()));
}

// The workers go at their own pace.
TEST(Stop, ends_ranks_of_an_asynchronous_store_that_all_got_the_signal) {
  const TempFolder folder;
  Ranks ranks(3, kTrain + Words{"--strategy", "kvstore", "--kvstore", "dist_async", "--checkpoint-dir",
                                folder / "checkpoints"});
  ASSERT_TRUE(ranks.have_made(2));
  for (int rank = 0; rank < ranks.count(); ++rank) ranks[rank].signal(SIGTERM);
  expect_all_end_with(ranks, kStopped);
  EXPECT_GT(stopped_after(ranks.metrics()), 0);
}

TEST(Stop, a_requeued_run_goes_on_with_the_same_bits) {
  const TempFolder folder;
  const Words train = kTrain + Words{"--checkpoint-dir", folder / "checkpoints"};
  Ranks first(2, train);
  ASSERT_TRUE(first.have_made(3));
  first[1].signal(SIGUSR1);
  expect_all_end_with(first, kStopped);
  const auto steps = static_cast<int64_t>(first.losses().size());
  const Words to_the_end = {"--max-steps", concat(steps + 3)};
  Ranks second(2, train + to_the_end, {{"SLURM_RESTART_COUNT", "1"}});
  expect_all_end_with(second, 0);
  Ranks never_stopped(2, kTrain + to_the_end);
  expect_all_end_with(never_stopped, 0);
  auto losses = first.losses();
  std::ranges::copy(second.losses(), std::back_inserter(losses));
  EXPECT_EQ(losses, never_stopped.losses());
}

// Without checkpoints it begins again, and the metrics of the first attempt are kept.
TEST(Stop, a_requeued_run_that_saves_nothing_begins_again) {
  const TempFolder folder;
  const std::string metrics = folder / "metrics";
  const Words train = kTrain + Words{"--max-steps", "3", "--metrics", metrics};
  for (const char* restarts : {"0", "1"}) {
    const Ended ended = run(with_variables({{"SLURM_RESTART_COUNT", restarts}}, train));
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
  }
  EXPECT_EQ(steps_in(metrics), 6U);
}

TEST(Stop, a_signal_before_the_first_step_is_not_lost) {
  const TempFolder folder;
  Ranks ranks(2, kTrain + Words{"--checkpoint-dir", folder / "checkpoints"});
  ASSERT_TRUE(wait_until([&] { return short_name_of(ranks[0].pid()).starts_with("lockstep-train"); }));
  ranks[0].signal(SIGTERM);
  expect_all_end_with(ranks, kStopped);
  EXPECT_EQ(stopped_after(ranks.metrics()), 1);
}

// One step follows. An epoch has ten.
TEST(Stop, a_signal_during_validation_is_not_lost) {
  const TempFolder folder;
  Ranks ranks(2,
              {MISBEHAVING_TASK, "--threads", "1", "--batch-size", "6000", "--checkpoint-dir", folder / "checkpoints"},
              {{"MISBEHAVE", "stop_in_validation"}});
  expect_all_end_with(ranks, kStopped);
  EXPECT_EQ(stopped_after(ranks.metrics()), 11);
  EXPECT_TRUE(folder.has("checkpoints/" + checkpoint_of(11)));
}

// The save goes on until somebody reads the pipe (tests/held_disk.h).
TEST(Stop, a_signal_during_a_save_is_not_lost) {
  constexpr size_t kSave = 200;
  const TempFolder folder;
  const std::string disk = folder / "disk";
  ASSERT_EQ(::mkfifo(disk.c_str(), 0600), 0);
  Ranks ranks(2,
              Words{MISBEHAVING_TASK} + Words(kTrain.begin() + 2, kTrain.end()) +
                  Words{"--checkpoint-dir", folder / "checkpoints", "--checkpoint-every", concat(kSave)},
              {{"LOCKSTEP_TEST_DISK", disk}});
  ASSERT_TRUE(ranks.have_made(kSave + 1));
  ranks[1].signal(SIGTERM);
  std::ifstream pipe(disk);
  std::filesystem::remove(disk);
  pipe.ignore(std::numeric_limits<std::streamsize>::max());
  expect_all_end_with(ranks, kStopped);
  const auto steps = stopped_after(ranks.metrics());
  EXPECT_EQ(steps, std::ssize(ranks.losses()));
  EXPECT_TRUE(folder.has("checkpoints/" + checkpoint_of(to_size(steps))));
}

// In loops of one's own, whose ranks are processes or threads of one; the program looks at the step.
TEST(Stop, ranks_leave_their_own_loop_after_the_same_step) {
  for (const char* habit : {"stop", "threads_stop"}) {
    const Ended ended = run(with_variables({{"HABIT", habit}}, {LOCKSTEP_COMMAND, "run", "--nproc-per-node", "2",
                                                                "--stop-code", "7", "--", UNUSUAL_LOOP}));
    EXPECT_EQ(ended.exit_code, 7) << habit << ": " << ended.error;
    EXPECT_FALSE(contains(ended.error, "RankFailed")) << ended.error;
  }
}

void interrupt_until_it_ends(const Child& child) {
  EXPECT_TRUE(wait_until([&child] {  // again and again: two SIGINT that wait at the same time are one
    child.signal(SIGINT);
    return !is_running(child.pid());
  }));
}

// With a launcher, and of one rank alone.
TEST(Stop, a_second_ctrl_c_ends_a_step_that_hangs) {
  for (const char* ranks : {"1", "2"}) {
    const TempFolder folder;
    const std::string metrics = folder / "metrics";
    Child child(
        with_variables({{"MISBEHAVE", "hang"}}, {MISBEHAVING_TASK, "--ranks", ranks, "--threads", "1", "--batch-size",
                                                 "32", "--timeout", "600", "--metrics", metrics, "--quiet"}));
    ASSERT_TRUE(wait_until([&] { return steps_in(metrics) == 9; }));
    child.signal(SIGINT);
    EXPECT_TRUE(is_running(child.pid()));
    interrupt_until_it_ends(child);
    EXPECT_EQ(child.wait(), 128 + SIGINT) << child.error();
  }
}

// `lockstep train --ranks 2`, which starts its ranks itself.
class StopOfLauncher : public ::testing::Test {
 protected:
  Words train(const Words& more = {}) {
    return kTrain + Words{"--ranks", "2", "--metrics", metrics_, "--checkpoint-dir", folder_ / "checkpoints"} + more;
  }
  bool has_begun() {
    return wait_until([this] { return steps_in(metrics_) >= 2; });
  }
  TempFolder folder_;
  std::string metrics_ = folder_ / "metrics";
};

TEST_F(StopOfLauncher, ends_the_run_at_the_first_ctrl_c) {
  Child launcher(train());
  ASSERT_TRUE(has_begun());
  launcher.signal(SIGINT);
  EXPECT_EQ(launcher.wait(), kStopped) << launcher.error();
  EXPECT_TRUE(contains(launcher.error(), "--resume goes on from here")) << launcher.error();
  EXPECT_FALSE(contains(launcher.error(), "RankFailed")) << launcher.error();
  EXPECT_GT(stopped_after(metrics_), 1);
}

TEST_F(StopOfLauncher, exits_with_the_code_that_was_chosen) {
  Child launcher(train({"--on-stop", "99", "--preempt-signal", "SIGUSR2"}));
  ASSERT_TRUE(has_begun());
  launcher.signal(SIGUSR2);
  EXPECT_EQ(launcher.wait(), 99) << launcher.error();
}

TEST_F(StopOfLauncher, stays_until_it_is_killed_and_a_second_ctrl_c_kills_it) {
  Child launcher(train({"--on-stop", "wait"}));
  ASSERT_TRUE(has_begun());
  launcher.signal(SIGTERM);
  ASSERT_TRUE(wait_until([this] { return stopped_after(metrics_) > 0; }));
  launcher.signal(SIGTERM);
  EXPECT_TRUE(is_running(launcher.pid()));
  interrupt_until_it_ends(launcher);
  EXPECT_EQ(launcher.wait(), 128 + SIGINT);
}

TEST_F(StopOfLauncher, is_shown_by_ps_with_its_ranks) {
  Child launcher(train());
  ASSERT_TRUE(has_begun());
  const Ended ps =
      run({"ps", "-ww", "-o", "comm,args", "--ppid", concat(launcher.pid()), "-p", concat(launcher.pid())});
  EXPECT_TRUE(contains(ps.output, "lockstep train --threads 1")) << ps.output;
  for (const char* rank : {"0", "1"}) {
    EXPECT_TRUE(contains(ps.output, concat("lockstep train [rank ", rank, " of 2] --threads 1"))) << ps.output;
    EXPECT_TRUE(contains(ps.output, concat("lockstep-r", rank))) << ps.output;
  }
}

TEST(Stop, a_bad_choice_is_a_usage_error) {
  for (const Words& bad : {Words{"--preempt-signal", "SIGKILL"}, Words{"--on-stop", "256"}, Words{"--on-stop", "1"},
                           Words{"--on-stop", "later"}})
    EXPECT_EQ(run(kTrain + bad).exit_code, 2) << bad.back();
  const Ended ended = run(with_variables({}, Words{"-u", "SLURM_JOB_ID"} + kTrain + Words{"--on-stop", "requeue"}));
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.error, "outside of a Slurm job")) << ended.error;
}

}  // namespace
}  // namespace lockstep::testing
