// SPDX-License-Identifier: Apache-2.0
#include "agent/start/launcher.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "tests/launch/child.h"

namespace lockstep {
namespace {

using testing::TempFolder;

struct Launched {
  LaunchResult result;
  std::string output;
  std::string error;
};

std::vector<std::string> probe(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), RANK_PROBE);
  return arguments;
}

constexpr std::chrono::minutes kLong{5};

Launched launch_probe(const StartOptions& options, const std::vector<std::string>& arguments,
                      const FailureOptions& failing = {}, const PlaceOptions& place = {}) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Launched launched{.result = launch(options, probe(arguments), failing, place), .output = "", .error = ""};
  launched.output = ::testing::internal::GetCapturedStdout();
  launched.error = ::testing::internal::GetCapturedStderr();
  return launched;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines = split(text, '\n');
  lines.pop_back();
  std::sort(lines.begin(), lines.end());
  return lines;
}

void expect_no_children() {
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

class WorldSizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Launch, WorldSizes, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(WorldSizes, gives_every_rank_its_variables_and_cores) {
  const int ranks = GetParam();
  const Launched launched = launch_probe(
      {.ranks = ranks},
      {"variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"},
      {}, {.nodes = 2, .node_rank = 1, .master_port = 29500});
  EXPECT_EQ(launched.result.exit_code, 0) << launched.error;
  std::vector<std::string> expected;
  for (int local = 0; local < ranks; ++local)
    expected.push_back(concat("[rank ", ranks + local, "] RANK=", ranks + local, " WORLD_SIZE=", 2 * ranks,
                              " LOCAL_RANK=", local, " LOCAL_WORLD_SIZE=", ranks,
                              " GROUP_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 cores=",
                              to_string(cores_of_rank(usable_cores(), local, ranks))));
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(sorted_lines(launched.output), expected);
}

TEST_P(WorldSizes, leaves_no_process_and_no_descriptor_behind) {
  const auto before = open_descriptors();
  EXPECT_EQ(launch_probe({.ranks = GetParam()}, {"lines", "1"}).result.exit_code, 0);
  EXPECT_EQ(open_descriptors(), before);
  expect_no_children();
}

TEST(Launch, all_ranks_can_meet_at_the_reserved_port) {
  EXPECT_EQ(launch_probe({.ranks = 3}, {"meet"}).result.exit_code, 0);
}

TEST(Launch, shares_out_the_cores_as_threads_or_keeps_the_users) {
  const std::vector<std::string> show = {"variables", "OMP_NUM_THREADS"};
  ::unsetenv("OMP_NUM_THREADS");
  EXPECT_NE(launch_probe({.ranks = 100, .pin = false}, show).output.find("OMP_NUM_THREADS=1 "), std::string::npos);
  ::setenv("OMP_NUM_THREADS", "5", 1);
  EXPECT_NE(launch_probe({.ranks = 1}, show).output.find("OMP_NUM_THREADS=5"), std::string::npos);
  ::unsetenv("OMP_NUM_THREADS");
}

TEST(Launch, without_pinning_every_rank_has_every_core) {
  const Launched launched = launch_probe({.ranks = 2, .pin = false}, {"variables"});
  const std::string cores = concat("cores=", to_string(usable_cores()));
  EXPECT_EQ(sorted_lines(launched.output), (std::vector<std::string>{"[rank 0] " + cores, "[rank 1] " + cores}));
}

TEST(Launch, passes_on_the_exit_code_and_the_last_lines_of_the_failed_rank) {
  const Stopwatch watch;
  const Launched launched = launch_probe({.ranks = 4}, {"fail", "3", "42", "30"}, {.grace = kLong});
  EXPECT_LT(watch.seconds(), testing::kAtOnce) << "waited for the grace period";
  EXPECT_EQ(launched.result.exit_code, 42);
  ASSERT_TRUE(launched.result.failure);
  EXPECT_EQ(launched.result.failure->rank, 3);
  EXPECT_EQ(launched.result.failure->end.signal, 0);
  ASSERT_EQ(launched.result.failure->last_lines.size(), 20U);
  EXPECT_EQ(launched.result.failure->last_lines.back(), "line 29");
  EXPECT_NE(launched.error.find("[rank 3] line 0\n"), std::string::npos);
  expect_no_children();
}

TEST(Launch, replaces_a_rank_that_fails_unless_it_was_used_in_a_wrong_way) {
  const Launched failed = launch_probe({.ranks = 2}, {"fail", "1", "1", "0"}, {.max_restarts = 2});
  EXPECT_EQ(failed.result.exit_code, 1);
  EXPECT_EQ(failed.result.restarts, 2);
  const Launched misused = launch_probe({.ranks = 2}, {"fail", "1", "2", "1"}, {.max_restarts = 2, .min_ranks = 1});
  EXPECT_EQ(misused.result.exit_code, 2);
  EXPECT_EQ(misused.result.restarts, 0);
  ASSERT_TRUE(misused.result.failure);
  EXPECT_EQ(misused.result.failure->last_lines, std::vector<std::string>{"line 0"});
  expect_no_children();
}

TEST(Launch, turns_a_signal_into_128_and_its_number) {
  for (const int signal : {SIGKILL, SIGSEGV, SIGABRT}) {
    const Launched launched = launch_probe({.ranks = 2}, {"end-by-signal", "1", concat(signal)});
    EXPECT_EQ(launched.result.exit_code, 128 + signal);
    ASSERT_TRUE(launched.result.failure);
    EXPECT_EQ(launched.result.failure->end.signal, signal);
    EXPECT_EQ(launched.result.failure->rank, 1);
  }
}

TEST(Launch, describes_a_failure) {
  const std::string text = describe({.rank = 2,
                                     .world_size = 4,
                                     .pid = 17,
                                     .end = {.signal = SIGKILL},
                                     .log = "logs/rank2.err",
                                     .last_lines = {"one", "two"}});
  for (const char* part : {"rank 2", "signal 9", "rank 2 of 4", "pid 17", "logs/rank2.err", "    one\n    two"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " not in\n" << text;
}

TEST(Launch, kills_a_rank_that_ignores_sigterm_after_the_grace_period) {
  const TempFolder folder;
  const std::string script = concat("if [ $RANK = 0 ]; then exec ", RANK_PROBE, " ignore-sigterm ", folder.path(),
                                    "; fi; ", "while [ ! -e ", folder.file("rank0"), " ]; do sleep 0.01; done; exit 5");
  const Stopwatch watch;
  const LaunchResult result = launch({.ranks = 2}, {"sh", "-c", script}, {.grace = std::chrono::milliseconds(200)});
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_GE(watch.seconds(), 0.2);
  EXPECT_FALSE(testing::is_running(testing::pid_in(folder, "rank0")));
}

TEST(Launch, ends_a_stopped_rank_at_once) {
  const TempFolder folder;
  const std::string file = folder.file("rank0");
  const std::string stand_still = concat("echo $$ > ", file, ".new; mv ", file, ".new ", file, "; kill -STOP $$");
  const std::string fail =
      concat("until grep -q '^State:.T' /proc/$(cat ", file, ")/status; do sleep 0.01; done; exit 5");
  const Stopwatch watch;
  const LaunchResult result =
      launch({.ranks = 2}, {"sh", "-c", concat("if [ $RANK = 0 ]; then ", stand_still, "; else ", fail, "; fi")},
             {.grace = kLong});
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_LT(watch.seconds(), testing::kAtOnce) << "waited for the grace period";
  EXPECT_FALSE(testing::is_running(testing::pid_in(folder, "rank0")));
}

TEST(Launch, names_a_program_that_does_not_exist) {
  const auto before = open_descriptors();
  try {
    launch({.ranks = 2}, std::vector<std::string>{"no-such-program"});
    FAIL() << "no error";
  } catch (const SystemError& error) {
    EXPECT_NE(std::string(error.what()).find("no-such-program"), std::string::npos) << error.what();
  }
  EXPECT_EQ(open_descriptors(), before);
  expect_no_children();
}

TEST(Launch, refuses_options_that_make_no_sense) {
  const std::vector<std::string> command = {"true"};
  EXPECT_THROW(launch({.ranks = 0}, command), UsageError);
  EXPECT_THROW(launch({.ranks = 65537}, command), UsageError);
  EXPECT_THROW(launch({.servers = 1}, command), UsageError);
  EXPECT_THROW(launch({}, command, {.min_ranks = 2}), UsageError);
  EXPECT_THROW(launch({}, command, {}, {.nodes = 2, .node_rank = 2, .master_port = 1}), UsageError);
  EXPECT_THROW(launch({}, command, {}, {.nodes = 2}), UsageError);
  EXPECT_THROW(launch({}, command, {}, {.master_port = 65536}), UsageError);
  expect_no_children();
}

TEST(Launch, output_goes_into_files_of_a_log_folder) {
  const TempFolder folder;
  const StartOptions options{.ranks = 2, .log_dir = folder.file("new/logs")};
  const Launched launched = launch_probe(options, {"lines", "1"});
  EXPECT_EQ(launched.output + launched.error, "");
  EXPECT_EQ(read_file(folder.file("new/logs/rank1.out")), "line 0 of rank 1;\n");
  EXPECT_EQ(read_file(folder.file("new/logs/rank1.err")), "");
  const LaunchResult failed = launch(options, probe({"fail", "1", "3", "25"}));
  ASSERT_TRUE(failed.failure);
  EXPECT_EQ(failed.failure->last_lines.size(), 20U);
  EXPECT_EQ(failed.failure->log, folder.file("new/logs/rank1.err"));
}

TEST(Launch, prefixed_output_has_whole_lines_only) {
  constexpr int kLines = 5000;
  const Launched launched = launch_probe({.ranks = 3}, {"lines", concat(kLines)});
  std::vector<std::string> expected;
  for (int rank = 0; rank < 3; ++rank)
    for (int line = 0; line < kLines; ++line)
      expected.push_back(concat("[rank ", rank, "] line ", line, " of rank ", rank, ";"));
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(sorted_lines(launched.output), expected);
}

TEST(Launch, a_long_line_without_newline_arrives_in_pieces) {
  const Launched launched = launch_probe({.ranks = 1}, {"long-line", "100000"});
  EXPECT_EQ(std::count(launched.output.begin(), launched.output.end(), 'x'), 100000);
  for (const std::string& line : sorted_lines(launched.output))
    EXPECT_TRUE(line.starts_with("[rank 0] xxx")) << line.size();
}

TEST(Launch, binary_output_arrives) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes += static_cast<char>(byte);
  bytes.insert(bytes.find('\n') + 1, "[rank 0] ");
  EXPECT_EQ(launch_probe({.ranks = 1}, {"bytes"}).output, "[rank 0] " + bytes + "\n");
}

TEST(Launch, rank_0_can_write_to_this_process_output) {
  const Launched launched = launch_probe({.ranks = 2, .first_is_plain = true}, {"lines", "1"});
  EXPECT_EQ(launched.output, "line 0 of rank 0;\n");
  EXPECT_EQ(launched.error, "[rank 1] line 0 of rank 1;\n");
}

TEST(Launch, does_not_wait_for_a_process_that_holds_a_dead_ranks_output) {
  const TempFolder folder;
  const Launched launched = launch_probe({.ranks = 1}, {"leave-grandchild", folder.path()});
  EXPECT_EQ(launched.output, "[rank 0] last words\n");
  const int grandchild = testing::pid_in(folder, "grandchild0");
  EXPECT_TRUE(testing::is_running(grandchild)) << "it left the rank's process group";
  ::kill(grandchild, SIGKILL);
}

TEST(Launch, runs_a_function_of_this_program_in_every_rank) {
  ::testing::internal::CaptureStdout();
  const auto before = open_descriptors();
  const LaunchResult result = launch({.ranks = 3}, [before] {
    std::printf("%s of %s, %td more\n", std::getenv("RANK"), std::getenv("WORLD_SIZE"), open_descriptors() - before);
    return 0;
  });
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(
      sorted_lines(::testing::internal::GetCapturedStdout()),
      (std::vector<std::string>{"[rank 0] 0 of 3, 0 more", "[rank 1] 1 of 3, 0 more", "[rank 2] 2 of 3, 0 more"}));
  EXPECT_EQ(std::getenv("RANK"), nullptr);
}

TEST(Launch, an_exception_of_the_function_fails_its_rank) {
  const LaunchResult result = launch({.ranks = 2}, []() -> int {
    if (std::getenv("RANK") == std::string("1")) throw UsageError({.what = "expected in this test"});
    for (;;) ::pause();
  });
  EXPECT_EQ(result.exit_code, 2);
  ASSERT_TRUE(result.failure);
  EXPECT_EQ(result.failure->last_lines.front(), "lockstep: UsageError: expected in this test");
}

TEST(Launch, restores_the_signals) {
  sigset_t before;
  sigset_t after;
  ::sigprocmask(SIG_SETMASK, nullptr, &before);
  launch({.ranks = 1}, [&before] {
    sigset_t mine;
    ::sigprocmask(SIG_SETMASK, nullptr, &mine);
    return ::sigismember(&mine, SIGTERM) == ::sigismember(&before, SIGTERM) ? 0 : 1;
  });
  ::sigprocmask(SIG_SETMASK, nullptr, &after);
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD})
    EXPECT_EQ(::sigismember(&before, signal), ::sigismember(&after, signal));
}

}  // namespace
}  // namespace lockstep
