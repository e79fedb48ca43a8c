// SPDX-License-Identifier: Apache-2.0
// Real ranks that stand still, and what the launcher finds out about them.
#include "agent/watch/hang_watch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <future>
#include <thread>

#include "agent/start/launcher.h"
#include "agent/watch/stacks.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "tests/launch/child.h"

namespace lockstep {
namespace {

using testing::TempFolder;
using testing::wait_until;

constexpr std::chrono::milliseconds kTimeout = std::chrono::seconds(1);

struct Watched {
  LaunchResult result;
  std::string error;
  double seconds;
};

Watched launch_and_watch(int ranks, const std::vector<std::string>& probe, const HangOptions& hang = {kTimeout},
                         int max_restarts = 0) {
  std::vector<std::string> command = {RANK_PROBE};
  command.insert(command.end(), probe.begin(), probe.end());
  ::testing::internal::CaptureStderr();
  const Stopwatch watch;
  const LaunchResult result =
      launch({.ranks = ranks, .pin = false}, command, {.max_restarts = max_restarts, .hang = hang});
  return {result, ::testing::internal::GetCapturedStderr(), watch.seconds()};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Rank 1 is named, killed, and its stack is shown before the others'.
void expect_that_rank_1_is_blamed(const Watched& watched) {
  ASSERT_TRUE(watched.result.failure) << watched.error;
  EXPECT_EQ(watched.result.failure->rank, 1);
  EXPECT_EQ(watched.result.exit_code, 128 + SIGKILL);
  EXPECT_TRUE(has(watched.result.failure->hang, "rank 1 has not moved for ")) << watched.result.failure->hang;
  EXPECT_TRUE(has(watched.result.failure->hang, ", in forward of step 17")) << watched.result.failure->hang;
  EXPECT_TRUE(has(watched.error, "holds up the others")) << watched.error;
  EXPECT_TRUE(has(watched.error, ": exchange of step 17, waits for rank 1\n")) << watched.error;
  EXPECT_LT(watched.error.find("stack of rank 1"), watched.error.find("stack of rank 0")) << watched.error;
}

TEST(HangWatch, shows_the_function_in_which_a_rank_loops_for_ever) {
  const Watched watched = launch_and_watch(3, {"stand-still", "loop"});
  expect_that_rank_1_is_blamed(watched);
  EXPECT_TRUE(has(watched.error, " spin_for_ever")) << watched.error;
  EXPECT_TRUE(has(watched.error, "stack of rank 2")) << watched.error;
}

TEST(HangWatch, shows_both_threads_of_a_deadlock) {
  const Watched watched = launch_and_watch(2, {"stand-still", "deadlock"});
  expect_that_rank_1_is_blamed(watched);
  const size_t first = watched.error.find(" wait_for_the_second_mutex");
  ASSERT_NE(first, std::string::npos) << watched.error;
  EXPECT_NE(watched.error.find(" wait_for_the_second_mutex", first + 1), std::string::npos) << watched.error;
}

TEST(HangWatch, says_that_a_rank_is_stopped) {
  const Watched watched = launch_and_watch(2, {"stand-still", "stop"});
  expect_that_rank_1_is_blamed(watched);
  EXPECT_TRUE(has(watched.error, "rank 1 is stopped and holds up the others")) << watched.error;
}

// A test's own thread continues or reads, while the launcher watches in the main one.
template <class Work>
std::future<void> meanwhile(const Work& work) {
  return std::async(std::launch::async, work);
}

TEST(HangWatch, a_rank_that_is_stopped_for_less_than_the_timeout_goes_on) {
  constexpr auto kLong = 20 * kTimeout;
  const TempFolder folder;
  const auto done = meanwhile([&] {
    const int pid = testing::pid_in(folder, "rank1");
    std::this_thread::sleep_for(kLong / 16);  // the watch looks meanwhile: 20 times in the timeout
    ::kill(pid, SIGCONT);
  });
  const Watched watched = launch_and_watch(2, {"be-stopped-for-a-while", folder.path()}, {kLong});
  EXPECT_EQ(watched.result.exit_code, 0) << watched.error;
  EXPECT_EQ(watched.error, "");
}

TEST(HangWatch, a_rank_with_a_debugger_is_not_blamed) {
  const TempFolder folder;
  const auto done = meanwhile([&] {
    const int pid = testing::pid_in(folder, "rank1");
    EXPECT_EQ(::ptrace(PTRACE_SEIZE, pid, nullptr, nullptr), 0);
    write_file(folder / "debugged", "");
    std::this_thread::sleep_for(3 * kTimeout);  // the time itself is what is tested here
    EXPECT_EQ(::ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr), 0);
    EXPECT_EQ(::waitpid(pid, nullptr, __WALL), pid);
    EXPECT_EQ(::ptrace(PTRACE_DETACH, pid, nullptr, nullptr), 0);
    write_file(folder / "go-on", "");
  });
  const Watched watched = launch_and_watch(2, {"hold-up", folder.path()});
  EXPECT_EQ(watched.result.exit_code, 0) << watched.error;
  EXPECT_EQ(watched.error, "");
}

TEST(HangWatch, a_rank_that_saves_has_more_time) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo(folder.file("disk").c_str(), 0600), 0);
  const auto done = meanwhile([&] {
    const int pid = testing::pid_in(folder, "saving");
    std::this_thread::sleep_for(3 * kTimeout);
    std::ifstream(folder.file("disk")).get();
    EXPECT_TRUE(wait_until([&] { return !testing::is_running(pid); }));
    std::this_thread::sleep_for(kTimeout / 2);  // several looks, at which only rank 1 is left
    write_file(folder / "saved", "");
  });
  const Watched watched = launch_and_watch(2, {"save-slowly", folder.path()});
  EXPECT_EQ(watched.result.exit_code, 0) << watched.error;
  EXPECT_EQ(watched.error, "");
  EXPECT_GE(watched.seconds, std::chrono::duration<double>(3 * kTimeout).count());
}

TEST(HangWatch, a_rank_that_never_ends_saving_is_blamed_in_the_end) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo(folder.file("disk").c_str(), 0600), 0);
  const Watched watched = launch_and_watch(2, {"save-slowly", folder.path()}, {kTimeout / 4});
  ASSERT_TRUE(watched.result.failure);
  EXPECT_EQ(watched.result.failure->rank, 0);
  EXPECT_TRUE(has(watched.result.failure->hang, ", in saving of step 17")) << watched.result.failure->hang;
  const double patience = std::chrono::duration<double>(kTimeout).count() / 4 * kPatienceWithSlowPhases;
  EXPECT_GE(watched.seconds, patience);
}

TEST(HangWatch, says_that_ranks_wait_in_a_circle) {
  const Watched watched = launch_and_watch(3, {"wait-in-a-circle"});
  EXPECT_EQ(watched.result.exit_code, 128 + SIGKILL);
  EXPECT_TRUE(has(watched.error, "the ranks wait for one another")) << watched.error;
}

TEST(HangWatch, leaves_ranks_alone_that_take_steps) {
  const Watched watched = launch_and_watch(2, {"take-steps", concat(3 * kTimeout.count())});
  EXPECT_EQ(watched.result.exit_code, 0) << watched.error;
  EXPECT_EQ(watched.error, "");
}

TEST(HangWatch, leaves_programs_alone_that_publish_nothing) {
  const std::string sleep = concat("sleep ", std::chrono::duration<double>(kTimeout).count());
  const LaunchResult result = launch({.ranks = 2}, {"sh", "-c", sleep}, {.hang = {.timeout = kTimeout / 20}});
  EXPECT_EQ(result.exit_code, 0);
}

TEST(HangWatch, can_be_told_to_report_only) {
  const TempFolder folder;
  const auto done = meanwhile([&] {
    const int pid = testing::pid_in(folder, "rank1");
    EXPECT_TRUE(
        wait_until([] { return has(read_file("/proc/self/fd/2"), "holds up the others"); }));  // the captured stderr
    ::kill(pid, SIGCONT);
  });
  const Watched watched = launch_and_watch(2, {"be-stopped-for-a-while", folder.path()}, {kTimeout, OnHang::kReport});
  EXPECT_EQ(watched.result.exit_code, 0) << watched.error;
  EXPECT_TRUE(has(watched.error, "rank 1 is stopped and holds up the others")) << watched.error;
}

TEST(HangWatch, a_rank_that_hangs_is_replaced_while_restarts_are_left) {
  const Watched watched = launch_and_watch(2, {"stand-still", "loop"}, {kTimeout}, /*max_restarts=*/1);
  expect_that_rank_1_is_blamed(watched);
  EXPECT_EQ(watched.result.restarts, 1);
}

TEST(HangWatch, can_be_told_to_end_the_job) {
  const Watched watched = launch_and_watch(2, {"stand-still", "loop"}, {kTimeout, OnHang::kEnd}, /*max_restarts=*/1);
  expect_that_rank_1_is_blamed(watched);
  EXPECT_EQ(watched.result.restarts, 0);
}

TEST(Stacks, without_a_debugger_shows_what_the_kernel_knows) {
  const TempFolder empty;
  const pid_t pid = ::fork();
  if (pid == 0)
    for (;;) ::pause();
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", empty.path().c_str(), 1);
  const std::string text = stacks_of(pid, Deadline::after(std::chrono::seconds(10)));
  ::setenv("PATH", path.c_str(), 1);
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  EXPECT_TRUE(has(text, "install gdb or elfutils")) << text;
  EXPECT_TRUE(has(text, concat("thread ", pid))) << text;
}

}  // namespace
}  // namespace lockstep
