// SPDX-License-Identifier: Apache-2.0
// Losses from which a job can't recover, or not at once.
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "agent/recover/job_memory.h"
#include "agent/start/launcher.h"
#include "lockstep/base/files/file.h"
#include "lockstep/deadline.h"
#include "lockstep/world.h"
#include "tests/recovery/jobs.h"

namespace lockstep {
namespace {

using testing::Child;
using testing::command_of;
using testing::contains;
using testing::count;
using testing::Job;
using testing::Outcome;
using testing::outcome_in;
using testing::run;
using testing::TempFolder;
using testing::wait_until;
using testing::Words;
using testing::operator+;

constexpr std::chrono::seconds kPatienceForJob{60};  // less than the four minutes after which the hang watch ends a job
const std::string kReplaced = "a new process takes its place";
const Words kMomentum = {"--momentum", "0.9"};

Outcome undisturbed() {
  const TempFolder folder;
  const auto ended = run(command_of({.options = kMomentum, .max_restarts = 0}, folder), kPatienceForJob);
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  return outcome_in(folder);
}

std::vector<int> children_of(int pid) {
  std::ifstream file(concat("/proc/", pid, "/task/", pid, "/children"));
  std::vector<int> pids;
  for (int child = 0; file >> child;) pids.push_back(child);
  return pids;
}

// The process among them that a signal has stopped; 0: none.
int stopped_among(const std::vector<int>& pids) {
  for (const int pid : pids) {
    std::ifstream file(concat("/proc/", pid, "/stat"));
    std::string line;
    std::getline(file, line);
    const size_t name_ends = line.rfind(')');
    if (name_ends != std::string::npos && line.substr(name_ends + 2, 1) == "T") return pid;
  }
  return 0;
}

int stopped_rank_of(const Child& launcher) {
  int rank = 0;
  EXPECT_TRUE(wait_until([&] { return (rank = stopped_among(children_of(launcher.pid()))) != 0; }, kPatienceForJob))
      << launcher.error();
  return rank;
}

TEST(BadCases, a_rank_that_dies_in_each_generation_ends_the_job_with_its_last_lines) {
  const TempFolder folder;
  const auto ended = run(command_of({.program_does = "dies_at_once", .max_restarts = 2}, folder), kPatienceForJob);
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_EQ(count(ended.error, kReplaced), 2) << ended.error;
  EXPECT_TRUE(contains(ended.error, "RankFailed: rank 1 exited with code 1"));
  EXPECT_TRUE(contains(ended.error, "a bug in the program"));
}

TEST(BadCases, a_rank_without_memory_in_each_generation_ends_the_job) {
  const TempFolder folder;
  const auto ended = run(command_of({.program_does = "exhausts_memory", .max_restarts = 2}, folder), kPatienceForJob);
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_EQ(count(ended.error, kReplaced), 2) << ended.error;
  EXPECT_TRUE(contains(ended.error, "RankFailed: rank 1"));
}

TEST(BadCases, a_model_with_a_parameter_without_elements_is_taken_over) {
  const auto outcome_of = [](const std::string& faults) {
    const TempFolder folder;
    const Job job{.options = kMomentum, .faults = faults, .program_does = "has_empty"};
    const auto ended = run(command_of(job, folder), kPatienceForJob);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    EXPECT_EQ(count(ended.error, kReplaced), faults.empty() ? 0 : 1) << ended.error;
    return outcome_in(folder);
  };
  EXPECT_EQ(testing::difference(outcome_of(""), outcome_of("rank=1,step=8,phase=update")), "");
}

// Memory of ranks that this rank's launcher holds, once it has read all that this rank has sent.
int memories_of_launcher() {
  static_cast<void>(JobMemory::get()->previous());
  int held = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(concat("/proc/", ::getppid(), "/fd")))
    if (std::filesystem::read_symlink(entry, ignored).string().starts_with("/memfd:lockstep the memory")) ++held;
  return held;
}

int make_and_end_groups() {
  const World world = World::from_env();
  for (int i = 0; i < 20; ++i) {
    const auto group = world.separate({0, 1});
    group->all_reduce(torch::ones({100'000}));
  }
  world.barrier();
  return memories_of_launcher();
}

TEST(BadCasesDeathTest, the_launcher_holds_no_memory_of_groups_that_have_ended) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // one with threads should not fork
  const StartOptions start{.ranks = 2, .first_is_plain = true};
  const FailureOptions failing{.max_restarts = 1};
  EXPECT_EXIT(std::exit(launch(start, make_and_end_groups, failing).exit_code), ::testing::ExitedWithCode(0), "");
}

TEST(BadCases, a_job_that_fewer_ranks_could_not_go_on_with_is_refused_at_the_start) {
  const TempFolder folder;
  const Job job{.options = {"--virtual-shards", "8", "--min-ranks", "2"}, .ranks = 4};
  const auto ended = run(command_of(job, folder), kPatienceForJob);
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.error, "8 virtual shards can't be divided among 3 ranks")) << ended.error;
  EXPECT_FALSE(contains(ended.error, "RankFailed")) << "no rank was started";
}

TEST(BadCases, a_launched_job_that_fewer_ranks_could_not_go_on_with_is_refused_at_the_start) {
  const TempFolder folder;
  const Words job = command_of({.options = {"--virtual-shards", "8"}, .ranks = 4, .max_restarts = 0}, folder);
  const Words launcher = {LOCKSTEP_COMMAND, "run", "--nproc-per-node", "4", "--min-ranks", "2", "--"};
  const auto ended = run(launcher + job, kPatienceForJob);
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.error, "8 virtual shards can't be divided among 3 ranks")) << ended.error;
  EXPECT_FALSE(contains(ended.error, "goes on with 3 ranks")) << ended.error;
}

// What the lost ranks' World kept is whole until the smaller World has kept its own.
TEST(BadCases, a_second_loss_before_the_smaller_world_has_kept_its_state_repeats_no_step) {
  const TempFolder folder;
  const Job job{.options = kMomentum + Words{"--separate-parameters", "--min-ranks", "2"},
                .faults = "rank=3,step=2,phase=forward;rank=2,step=2,phase=forward,generation=1",
                .ranks = 4,
                .max_restarts = 0};
  const auto ended = run(command_of(job, folder), kPatienceForJob);
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  std::vector<int> resumed_at;
  for (const auto& line : testing::metrics_in(folder.file("metrics.jsonl")))
    if (line["event"] == "resume") resumed_at.push_back(line["step"]);
  EXPECT_EQ(resumed_at, (std::vector{2, 2})) << ended.error;
}

TEST(BadCases, more_losses_than_restarts_end_the_job_and_the_last_checkpoint_stands) {
  const TempFolder folder;
  const Job job{.options = kMomentum,
                .faults =
                    "rank=1,step=7,phase=forward;rank=0,step=9,phase=update,generation=1;"
                    "rank=1,step=14,phase=backward,generation=2",
                .max_restarts = 2};
  const auto ended = run(command_of(job, folder), kPatienceForJob);
  EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.error;
  EXPECT_EQ(count(ended.error, kReplaced), 2) << ended.error;
  EXPECT_TRUE(contains(ended.error, "RankFailed: rank 1 was ended by signal 9"));
  const auto resumed =
      run(command_of({.options = kMomentum + Words{"--resume"}, .max_restarts = 0}, folder), kPatienceForJob);
  EXPECT_EQ(resumed.exit_code, 0) << resumed.error;
  EXPECT_EQ(testing::difference(undisturbed(), outcome_in(folder)), "");
}

TEST(BadCases, a_replacement_with_another_program_is_refused) {
  const TempFolder folder;
  const std::string program = folder.file("program");
  std::filesystem::copy_file(FRAGILE_TASK, program);
  Words command = command_of({.options = kMomentum, .faults = "rank=1,step=8,phase=between,signal=19"}, folder);
  std::vector<std::string> launched = {LOCKSTEP_COMMAND, "run", "--nproc-per-node", "2", "--max-restarts", "2", "--"};
  for (std::string& word : command) {
    if (word == FRAGILE_TASK) word = program;
    launched.push_back(word);
  }
  Child launcher(launched);
  const int stopped = stopped_rank_of(launcher);
  std::filesystem::rename(program, folder.file("old"));
  std::filesystem::copy_file(OTHER_PROGRAM, program);
  ::kill(stopped, SIGKILL);
  EXPECT_EQ(launcher.wait(kPatienceForJob), 1) << launcher.error();
  EXPECT_TRUE(contains(launcher.error(), "another program"));
}

TEST(BadCases, a_killed_launcher_leaves_nothing_but_the_last_checkpoint) {
  const TempFolder folder;
  Child launcher(command_of({.options = kMomentum, .faults = "rank=1,step=8,phase=between,signal=19"}, folder));
  stopped_rank_of(launcher);
  const std::vector<int> ranks = children_of(launcher.pid());
  ASSERT_GE(ranks.size(), 2);
  ASSERT_TRUE(
      wait_until([&] { return std::filesystem::exists(folder.file("checkpoints/step-00000006.safetensors")); }));
  launcher.signal(SIGKILL);
  launcher.wait(kPatienceForJob);
  for (const int rank : ranks) EXPECT_TRUE(wait_until([&] { return !testing::is_running(rank); })) << rank;
  const auto resumed =
      run(command_of({.options = kMomentum + Words{"--resume"}, .max_restarts = 0}, folder), kPatienceForJob);
  EXPECT_EQ(resumed.exit_code, 0) << resumed.error;
  EXPECT_EQ(testing::difference(undisturbed(), outcome_in(folder)), "");
}

TEST(BadCases, a_rank_stopped_for_less_than_the_timeout_is_waited_for) {
  const TempFolder folder;
  Child launcher(command_of(
      {.options = kMomentum + Words{"--timeout", "20"}, .faults = "rank=1,step=8,phase=backward,signal=19"}, folder));
  const int rank = stopped_rank_of(launcher);
  EXPECT_EQ(launcher.wait(std::chrono::milliseconds(500)), -1);  // all wait
  ::kill(rank, SIGCONT);
  EXPECT_EQ(launcher.wait(kPatienceForJob), 0) << launcher.error();
  EXPECT_EQ(count(launcher.error(), kReplaced), 0) << launcher.error();
  EXPECT_EQ(testing::difference(undisturbed(), outcome_in(folder)), "");
}

TEST(BadCases, a_rank_stopped_for_longer_than_the_timeout_is_replaced) {
  const TempFolder folder;
  Child launcher(command_of(
      {.options = kMomentum + Words{"--timeout", "1"}, .faults = "rank=1,step=8,phase=backward,signal=19"}, folder));
  stopped_rank_of(launcher);
  EXPECT_EQ(launcher.wait(kPatienceForJob), 0) << launcher.error();
  EXPECT_EQ(count(launcher.error(), kReplaced), 1) << launcher.error();
  EXPECT_EQ(testing::difference(undisturbed(), outcome_in(folder)), "");
}

}  // namespace
}  // namespace lockstep
