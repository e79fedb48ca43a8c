// SPDX-License-Identifier: Apache-2.0
// The `lockstep` command as a process: signals to it, its death, its options and exit codes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <array>

#include "lockstep/base/files/file.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "tests/launch/child.h"

namespace lockstep::testing {
namespace {

using Words = std::vector<std::string>;

Words lockstep_run(const Words& options, const Words& probe) {
  Words command = {LOCKSTEP_COMMAND, "run"};
  command.insert(command.end(), options.begin(), options.end());
  command.insert(command.end(), {"--", RANK_PROBE});
  command.insert(command.end(), probe.begin(), probe.end());
  return command;
}

std::vector<int> pids_of_ranks(const TempFolder& folder, int ranks) {
  std::vector<int> pids;
  for (int rank = 0; rank < ranks; ++rank) pids.push_back(testing::pid_in(folder, concat("rank", rank)));
  return pids;
}

void expect_all_gone(const std::vector<int>& pids) {
  for (const int pid : pids)
    EXPECT_TRUE(pid > 0 && wait_until([pid] { return !is_running(pid); }, std::chrono::seconds(2))) << pid;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(LockstepRun, passes_sigterm_on_to_the_ranks) {
  const TempFolder folder;
  Child launcher(lockstep_run({"--nproc-per-node", "2"}, {"exit-on-sigterm", folder.path()}));
  const auto ranks = pids_of_ranks(folder, 2);
  launcher.signal(SIGTERM);
  EXPECT_EQ(launcher.wait(), 128 + SIGTERM);
  EXPECT_TRUE(folder.has("rank0.stopped"));
  EXPECT_TRUE(folder.has("rank1.stopped"));
  expect_all_gone(ranks);
}

TEST(LockstepRun, kills_ranks_that_ignore_sigterm_after_the_grace_period) {
  const TempFolder folder;
  Child launcher(lockstep_run({"--nproc-per-node", "2", "--grace", "0.2"}, {"ignore-sigterm", folder.path()}));
  const auto ranks = pids_of_ranks(folder, 2);
  launcher.signal(SIGTERM);
  EXPECT_EQ(launcher.wait(), 128 + SIGTERM);
  expect_all_gone(ranks);
}

TEST(LockstepRun, a_second_sigint_kills_at_once) {
  const TempFolder folder;
  Child launcher(lockstep_run({"--nproc-per-node", "2", "--grace", "3600"}, {"ignore-sigterm", folder.path()}));
  const auto ranks = pids_of_ranks(folder, 2);
  EXPECT_TRUE(wait_until([&launcher] {  // again and again: two SIGINT that wait at the same time are one
    launcher.signal(SIGINT);
    return !is_running(launcher.pid());
  }));
  EXPECT_EQ(launcher.wait(), 128 + SIGINT);
  expect_all_gone(ranks);
}

TEST(LockstepRun, kills_ranks_and_what_they_started_when_it_is_killed) {
  const TempFolder folder;
  Child launcher(lockstep_run({"--nproc-per-node", "3"}, {"hang-with-grandchild", folder.path()}));
  auto pids = pids_of_ranks(folder, 3);
  for (int rank = 0; rank < 3; ++rank) pids.push_back(testing::pid_in(folder, concat("grandchild", rank)));
  launcher.signal(SIGKILL);
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  expect_all_gone(pids);
}

TEST(LockstepRun, ends_what_a_failed_rank_started) {
  const TempFolder folder;
  Child launcher(lockstep_run({"--nproc-per-node", "2"}, {"hang-with-grandchild", folder.path()}));
  auto pids = pids_of_ranks(folder, 2);
  for (int rank = 0; rank < 2; ++rank) pids.push_back(testing::pid_in(folder, concat("grandchild", rank)));
  ::kill(pids[1], SIGKILL);
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  EXPECT_TRUE(contains(launcher.error(), "rank 1 was ended by signal 9")) << launcher.error();
  expect_all_gone(pids);
}

// A pipe from this test's child to this test, as `lockstep run … | reader` has it.
struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) return;
    reader.reset(ends[0]);
    writer.reset(ends[1]);
    ::fcntl(reader.get(), F_SETFD, FD_CLOEXEC);
  }
  UniqueFd reader;
  UniqueFd writer;
};

std::string run_into(const Pipe& pipe, const Words& probe) {
  return concat("exec ", LOCKSTEP_COMMAND, " run --grace 0.2 ", RANK_PROBE, " ", join(probe, " "), " >&",
                pipe.writer.get(), " 2>&1 ", pipe.writer.get(), ">&-");
}

TEST(LockstepRun, closes_its_output_when_it_is_killed) {
  const TempFolder folder;
  Pipe pipe;
  Child launcher({"sh", "-c", run_into(pipe, {"hang", folder.path()})});
  const auto ranks = pids_of_ranks(folder, 1);
  pipe.writer.reset();
  launcher.signal(SIGKILL);
  pollfd end{.fd = pipe.reader.get(), .events = POLLIN, .revents = 0};
  char byte = 0;
  ASSERT_EQ(::poll(&end, 1, 2000), 1);
  EXPECT_EQ(::read(pipe.reader.get(), &byte, 1), 0);
  expect_all_gone(ranks);
}

TEST(LockstepRun, handles_signals_while_the_reader_of_its_output_is_stopped) {
  Pipe pipe;
  Child launcher({"sh", "-c", run_into(pipe, {"lines", "1000000"})});
  const auto is_full = [&pipe] {
    pollfd room{.fd = pipe.writer.get(), .events = POLLOUT, .revents = 0};
    return ::poll(&room, 1, 0) == 0;
  };
  ASSERT_TRUE(wait_until(is_full));
  EXPECT_TRUE(wait_until([&launcher] {  // the first stops the ranks, the next this waiting for the reader
    launcher.signal(SIGTERM);
    return !is_running(launcher.pid());
  }));
  EXPECT_EQ(launcher.wait(), 128 + SIGTERM);
}

TEST(LockstepRun, goes_on_while_the_reader_of_its_output_is_stopped) {
  constexpr int kLines = 200000;
  const TempFolder folder;
  Pipe pipe;
  const std::string rank = concat("\"", RANK_PROBE, " lines ", kLines, " && touch ", folder.file("done"), "\"");
  Child launcher({"sh", "-c",
                  concat("exec ", LOCKSTEP_COMMAND, " run sh -c ", rank, " >&", pipe.writer.get(), " ",
                         pipe.writer.get(), ">&-")});
  ASSERT_TRUE(wait_until([&folder] { return folder.has("done"); })) << "the rank waits for the reader";
  pipe.writer.reset();
  size_t lines = 0;
  std::array<char, 65536> buffer;
  for (ssize_t some = 0; (some = ::read(pipe.reader.get(), buffer.data(), buffer.size())) > 0;)
    lines += static_cast<size_t>(std::count(buffer.data(), buffer.data() + some, '\n'));
  EXPECT_EQ(lines, kLines);
  EXPECT_EQ(launcher.wait(), 0);
}

TEST(LockstepRun, refuses_more_ranks_than_any_machine_has) {
  const Ended ended = run({LOCKSTEP_COMMAND, "run", "--nproc-per-node", "65537", "true"});
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.error, "--nproc-per-node is '65537'")) << ended.error;
  EXPECT_TRUE(contains(ended.error, "65536")) << ended.error;
}

TEST(LockstepRun, two_at_the_same_time_have_different_ports) {
  const TempFolder folders[2];
  const std::string script = "echo $MASTER_PORT; exec \"$0\" hang \"$1\"";
  Child one({LOCKSTEP_COMMAND, "run", "sh", "-c", script, RANK_PROBE, folders[0].path()});
  Child other({LOCKSTEP_COMMAND, "run", "sh", "-c", script, RANK_PROBE, folders[1].path()});
  const auto has_port = [](const Child& child) { return contains(child.output(), "\n"); };
  ASSERT_TRUE(wait_until([&] { return has_port(one) && has_port(other); }));
  EXPECT_NE(one.output(), other.output());
  for (Child* child : {&one, &other}) child->signal(SIGTERM);
  EXPECT_EQ(one.wait(), 128 + SIGTERM);
  EXPECT_EQ(other.wait(), 128 + SIGTERM);
}

TEST(LockstepRun, accepts_torchruns_spellings) {
  Child with_dashes({LOCKSTEP_COMMAND, "run", "--nproc-per-node=2", "--", RANK_PROBE, "variables", "WORLD_SIZE"});
  Child with_underscores({LOCKSTEP_COMMAND, "run", "--nproc_per_node", "2", RANK_PROBE, "variables", "WORLD_SIZE"});
  EXPECT_EQ(with_dashes.wait(), 0);
  EXPECT_EQ(with_underscores.wait(), 0);
  EXPECT_TRUE(contains(with_dashes.output(), "[rank 1] WORLD_SIZE=2 ")) << with_dashes.output();
  EXPECT_TRUE(contains(with_underscores.output(), "[rank 1] WORLD_SIZE=2 ")) << with_underscores.output();
}

// The ranks' variables on one line each.
const Words kShowPlace = {RANK_PROBE, "variables", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"};

Words on_machine(const ReservedPort& port, const std::string& ranks, const Words& options) {
  Words command = {
      LOCKSTEP_COMMAND, "run", "--nproc-per-node", ranks, "--rdzv-endpoint", concat("127.0.0.1:", port.number())};
  command.insert(command.end(), options.begin(), options.end());
  command.insert(command.end(), kShowPlace.begin(), kShowPlace.end());
  return command;
}

TEST(LockstepRun, machines_that_meet_number_themselves) {
  const ReservedPort port;
  const Words options = {"--nnodes",  "2:3",   "--rdzv-backend", "c10d",
                         "--rdzv_id", "a job", "--rdzv-conf",    "join_timeout=20,last_call_timeout=1,lost_after=5"};
  Words by_variables = {"env",
                        "PET_NNODES=2:3",
                        "PET_NPROC_PER_NODE=2",
                        "PET_RDZV_BACKEND=c10d",
                        concat("PET_RDZV_ENDPOINT=127.0.0.1:", port.number()),
                        "PET_RDZV_ID=a job",
                        "PET_RDZV_CONF=join_timeout=20,last_call_timeout=1",
                        LOCKSTEP_COMMAND,
                        "run"};
  by_variables.insert(by_variables.end(), kShowPlace.begin(), kShowPlace.end());
  Child two(by_variables);
  Child three(on_machine(port, "3", options));
  EXPECT_EQ(two.wait(), 0) << two.error();
  EXPECT_EQ(three.wait(), 0) << three.error();
  const std::string output = two.output() + three.output();
  for (int rank = 0; rank < 5; ++rank)
    EXPECT_TRUE(contains(output, concat("[rank ", rank, "] RANK=", rank, " LOCAL_RANK="))) << output;
  EXPECT_TRUE(contains(output, "WORLD_SIZE=5 MASTER_PORT=")) << output;
}

// Two hosts that are this one: a shell in place of ssh. tests/hosts/ssh_test.sh has real ones.
struct LockstepRunHosts : ::testing::Test {
  LockstepRunHosts() {
    write_file(folder.file("ssh"), "while [ $1 = -o ]; do shift 2; done\nshift\nexec sh -c \"$*\"\n");
  }
  Words command(const Words& program) const {
    Words words = {"env",
                   "LOCKSTEP_SSH=sh " + folder.file("ssh"),
                   "VALUE=it's 1",
                   LOCKSTEP_COMMAND,
                   "run",
                   "--hosts",
                   "127.0.0.1:2,localhost",
                   "--export",
                   "VALUE",
                   "--rdzv-endpoint",
                   concat("127.0.0.1:", port.number()),
                   "--"};
    words.insert(words.end(), program.begin(), program.end());
    return words;
  }
  TempFolder folder;
  ReservedPort port;
};

TEST_F(LockstepRunHosts, starts_ranks_on_all) {
  const Ended ended = run(command({RANK_PROBE, "variables", "WORLD_SIZE", "VALUE", "LOCKSTEP_SECRET"}));
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  const Words lines = split(ended.output, '\n');
  EXPECT_EQ(lines.size(), 4) << ended.output;
  const auto count = [&lines](const std::string& start) {
    return std::ranges::count_if(lines, [&start](const std::string& line) {
      return line.starts_with(start) && contains(line, "] WORLD_SIZE=3 VALUE=it's 1 LOCKSTEP_SECRET=(not set) ");
    });
  };
  EXPECT_EQ(count("[127.0.0.1 rank "), 2) << ended.output;
  EXPECT_EQ(count("[localhost rank "), 1) << ended.output;
}

TEST_F(LockstepRunHosts, exits_with_the_code_of_the_one_that_fails_and_names_it) {
  const Ended ended = run(command({"sh", "-c", "[ $LOCAL_WORLD_SIZE = 2 ] && exit 7; sleep 1000"}));
  EXPECT_EQ(ended.exit_code, 7);
  EXPECT_TRUE(contains(ended.error, "\nlockstep: host 127.0.0.1 exited with code 7\n")) << ended.error;
}

TEST_F(LockstepRunHosts, ends_all_when_it_is_interrupted_or_killed) {
  for (const int signal : {SIGINT, SIGTERM, SIGKILL}) {
    const TempFolder ranks;
    Child launcher(command({RANK_PROBE, "hang", ranks.path()}));
    const auto pids = pids_of_ranks(ranks, 3);
    launcher.signal(signal);
    EXPECT_EQ(launcher.wait(), 128 + signal);
    for (const int pid : pids) EXPECT_TRUE(pid > 0 && wait_until([pid] { return !is_running(pid); })) << pid;
  }
}

TEST_F(LockstepRunHosts, names_those_that_do_not_answer) {
  write_file(folder.file("ssh"), "exit 3\n");
  const Ended ended = run(command({"touch", folder.file("started")}));
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "    127.0.0.1: exited with code 3\n    localhost: exited with code 3"))
      << ended.error;
  EXPECT_FALSE(folder.has("started"));
}

TEST(LockstepRun, reads_torchruns_variables) {
  const ReservedPort port;
  const Words probe = {LOCKSTEP_COMMAND, "run",        RANK_PROBE,    "variables",
                       "RANK",           "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
  Words by_number = {"env",
                     "PET_NNODES=2",
                     "PET_NPROC_PER_NODE=2",
                     "PET_NODE_RANK=1",
                     "PET_MASTER_ADDR=gpu-a",
                     "PET_MASTER_PORT=29500"};
  by_number.insert(by_number.end(), probe.begin(), probe.end());
  Child kubeflow(by_number);
  EXPECT_EQ(kubeflow.wait(), 0) << kubeflow.error();
  EXPECT_TRUE(contains(kubeflow.output(), "RANK=3 WORLD_SIZE=4 MASTER_ADDR=gpu-a MASTER_PORT=29500"))
      << kubeflow.output();
  Words alone = {"env", "PET_STANDALONE=1", "PET_NNODES=7", "PET_NODE_RANK=3", "PET_MASTER_PORT=1"};
  alone.insert(alone.end(), probe.begin(), probe.end());
  Child standalone(alone);
  EXPECT_EQ(standalone.wait(), 0) << standalone.error();
  EXPECT_TRUE(contains(standalone.output(), "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1")) << standalone.output();
}

TEST(LockstepRun, takes_the_endpoint_for_the_address_where_machines_are_numbered) {
  Child child({LOCKSTEP_COMMAND, "run", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "[2001:db8::1]:4711",
               RANK_PROBE, "variables", "RANK", "MASTER_ADDR", "MASTER_PORT"});
  EXPECT_EQ(child.wait(), 0) << child.error();
  EXPECT_TRUE(contains(child.output(), "RANK=1 MASTER_ADDR=2001:db8::1 MASTER_PORT=4711")) << child.output();
}

TEST(LockstepRun, lets_ranks_stop_in_their_own_time) {
  const TempFolder folder;
  const std::string rank = "trap 'exit 143' USR1; touch $0$RANK; while :; do sleep 0.05; done";
  Child launcher({LOCKSTEP_COMMAND, "run", "--nproc-per-node", "2", "sh", "-c", rank, folder.file("rank")});
  ASSERT_TRUE(wait_until([&folder] { return folder.has("rank0") && folder.has("rank1"); }));
  launcher.signal(SIGUSR1);
  EXPECT_EQ(launcher.wait(), 143);
  EXPECT_FALSE(contains(launcher.error(), "RankFailed")) << launcher.error();
}

TEST(LockstepRun, exits_with_the_code_of_ranks_that_have_stopped) {
  for (const int signal : {SIGUSR1, SIGTERM}) {
    const TempFolder folder;
    const std::string rank = "trap 'exit 99' USR1 TERM; touch $0$RANK; while :; do sleep 0.05; done";
    Child launcher(
        {LOCKSTEP_COMMAND, "run", "--nproc-per-node", "2", "--stop-code", "99", "sh", "-c", rank, folder.file("rank")});
    ASSERT_TRUE(wait_until([&folder] { return folder.has("rank0") && folder.has("rank1"); }));
    launcher.signal(signal);
    EXPECT_EQ(launcher.wait(), 99);
    EXPECT_FALSE(contains(launcher.error(), "RankFailed")) << launcher.error();
  }
}

TEST(LockstepRun, takes_143_for_a_failure_of_a_rank_that_nobody_asked_to_stop) {
  Child launcher({LOCKSTEP_COMMAND, "run", "--nproc-per-node", "2", "--grace", "1", "sh", "-c",
                  "[ $RANK = 0 ] && exit 143; sleep 1000"});
  EXPECT_EQ(launcher.wait(), 143);
  EXPECT_TRUE(contains(launcher.error(), "rank 0 exited with code 143")) << launcher.error();
}

TEST(LockstepRun, writes_output_into_the_log_folder) {
  const TempFolder folder;
  const Ended ended = run(lockstep_run({"--nproc_per_node", "2", "--log_dir", folder.file("logs")}, {"lines", "1"}));
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_EQ(ended.output + ended.error, "");
  EXPECT_EQ(read_file(folder.file("logs/rank1.out")), "line 0 of rank 1;\n");
}

TEST(LockstepRun, passes_the_programs_own_options_on) {
  for (const Words& dashes : {Words{}, Words{"--"}}) {
    Words command = {LOCKSTEP_COMMAND, "run", "--no-pin"};
    command.insert(command.end(), dashes.begin(), dashes.end());
    command.insert(command.end(), {"echo", "--nnodes", "7", "--", "-x", "--help"});
    Child child(command);
    EXPECT_EQ(child.wait(), 0) << child.error();
    EXPECT_EQ(child.output(), "[rank 0] --nnodes 7 -- -x --help\n");
  }
}

TEST(LockstepRun, wrong_options_exit_with_2) {
  for (const Words& options : std::vector<Words>{
           {"--bogus", "true"},
           {"--nproc-per-node", "many", "true"},
           {"--nproc-per-node", "0", "true"},
           {"--grace", "-1", "true"},
           {"--stop-code", "1", "true"},
           {"--output", "split", "true"},
           {"--servers", "1", "--workers", "1", "true"},
           {"--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "gpu-a", "--rdzv-conf", "lost_after=0",
            "true"},
           {"--nnodes", "2", "--master-port", "29500", "true"},
           {"--nnodes", "1:2", "true"},
           {"--nnodes", "2:1", "true"},
           {"--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "29500", "--min-ranks", "1", "true"},
           {"--nnodes", "2", "--rdzv-backend", "c10d", "true"},
           {"--nnodes", "2", "--rdzv-backend", "etcd", "true"},
           {"--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--lost-after", "3", "true"},
           {"--max-restarts", "1", "--spares", "1", "true"},
           {"--threads-per-rank", "1", "true"},
           {"--nnodes", "2", "--rdzv-endpoint", "gpu-a:port", "true"},
           {"--hosts", "gpu-a:0", "true"},
           {"--hosts", "gpu-a", "--nnodes", "2", "true"},
           {"--export", "PATH", "true"},
           {"--hosts", "gpu-a", "--"},
           {"--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"},
           {}}) {
    Words command = {LOCKSTEP_COMMAND, "run"};
    command.insert(command.end(), options.begin(), options.end());
    Child child(command);
    EXPECT_EQ(child.wait(), 2) << join(options, " ");
    EXPECT_NE(child.error(), "");
  }
}

TEST(LockstepRun, no_such_program_exits_with_1_and_names_it) {
  Child child({LOCKSTEP_COMMAND, "run", "no-such-program"});
  EXPECT_EQ(child.wait(), 1);
  EXPECT_TRUE(contains(child.error(), "no-such-program")) << child.error();
}

TEST(LockstepEnv, shows_every_setting_and_its_source) {
  Child child({"env", "RANK=1", "WORLD_SIZE=3", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500", LOCKSTEP_COMMAND, "env"});
  EXPECT_EQ(child.wait(), 0) << child.error();
  for (const char* part :
       {"MASTER_PORT", "29500", "job_id", "cores_of_rank", "threads_per_rank", "CUDA_VISIBLE_DEVICES"})
    EXPECT_TRUE(contains(child.output(), part)) << part << " not in\n" << child.output();
}

TEST(LockstepEnv, shows_the_machine_and_the_cores_of_ranks) {
  Child child({LOCKSTEP_COMMAND, "env", "--ranks", "2"});
  EXPECT_EQ(child.wait(), 0) << child.error();
  for (const char* part : {"machine: ", "NUMA node", "    rank 0: ", "    rank 1: "})
    EXPECT_TRUE(contains(child.output(), part)) << part << " not in\n" << child.output();
  for (const char* ranks : {"0", "two", "-1", "65537"})
    EXPECT_EQ(Child({LOCKSTEP_COMMAND, "env", "--ranks", ranks}).wait(), 2);
}

TEST(LockstepEnv, fails_in_a_partial_environment) {
  Child child({"env", "RANK=1", LOCKSTEP_COMMAND, "env"});
  EXPECT_EQ(child.wait(), 1);
  EXPECT_TRUE(contains(child.error(), "missing: WORLD_SIZE, MASTER_ADDR, MASTER_PORT")) << child.error();
}

TEST(Lockstep, lists_its_subcommands_and_version) {
  Child alone({LOCKSTEP_COMMAND});
  EXPECT_EQ(alone.wait(), 0);
  EXPECT_TRUE(contains(alone.output(), "  run ")) << alone.output();
  Child version({LOCKSTEP_COMMAND, "--version"});
  EXPECT_EQ(version.wait(), 0);
  EXPECT_TRUE(version.output().starts_with("lockstep ")) << version.output();
}

TEST(Lockstep, an_unknown_subcommand_exits_with_2_and_says_where_they_are_listed) {
  Child child({LOCKSTEP_COMMAND, "rnu"});
  EXPECT_EQ(child.wait(), 2);
  EXPECT_TRUE(contains(child.error(), "'rnu'") && contains(child.error(), "lockstep --help")) << child.error();
  Child unlike({LOCKSTEP_COMMAND, "--frobnicate"});
  EXPECT_EQ(unlike.wait(), 2);
}

}  // namespace
}  // namespace lockstep::testing
