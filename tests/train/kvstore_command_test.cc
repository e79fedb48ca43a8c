// SPDX-License-Identifier: Apache-2.0
// `--strategy kvstore` as processes: servers and workers that are started, killed and stopped for real.
#include <dirent.h>
#include <signal.h>

#include <cmath>
#include <numeric>
#include <optional>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "tests/launch/child.h"
#include "tests/support.h"
#include "tests/train/command.h"

namespace lockstep {
namespace {

using testing::Child;
using testing::contains;
using testing::Ended;
using testing::losses_in;
using testing::metrics_in;
using testing::run;
using testing::TempFolder;
using testing::with_variables;
using testing::operator+;
using testing::steps_in;
using testing::Words;

const Words kStoreProgram = {MISBEHAVING_TASK, "--threads", "1"};
Words kvstore(const std::string& kind) {
  return kStoreProgram + Words{"--strategy", "kvstore", "--kvstore", kind, "--seed", "3"};
}

std::string tensors_of(const std::filesystem::path& path) {
  const std::string bytes = read_file(path);
  return bytes.substr(8 + *reinterpret_cast<const uint64_t*>(bytes.data()));
}

TEST(KVStoreCommand, dist_sync_trains_as_one_rank_does_and_resumes_bit_exactly) {
  const TempFolder folder;
  const auto train = [&](const std::string& name, const Words& more) {
    const Ended ended = run(kvstore("dist_sync") +
                            Words{"--servers", "2", "--ranks", "2", "--devices-per-worker", "1,2", "--split-above",
                                  "5000", "--batch-size", "64", "--quiet", "--metrics", folder / (name + ".jsonl"),
                                  "--checkpoint-dir", folder / name, "--checkpoint-every", "4"} +
                            more);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
  };
  train("whole", {"--max-steps", "10"});
  train("parts", {"--max-steps", "4"});
  train("parts", {"--max-steps", "10", "--resume"});
  EXPECT_EQ(tensors_of(folder / "whole" / "step-00000010.safetensors"),
            tensors_of(folder / "parts" / "step-00000010.safetensors"));
  const auto last = metrics_in(folder / "whole.jsonl").back();
  EXPECT_EQ(last["examples_per_update"], 64);
  EXPECT_EQ(last["devices_per_worker"], 2);
  EXPECT_EQ(last["max_delay"], 0);
  EXPECT_EQ(run(kStoreProgram + Words{"--max-steps", "10", "--seed", "3", "--batch-size", "64", "--quiet", "--metrics",
                                      folder / "one.jsonl"})
                .exit_code,
            0);
  const auto one = losses_in(folder / "one.jsonl");
  const auto many = losses_in(folder / "whole.jsonl");
  ASSERT_EQ(one.size(), many.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], many[i], 1e-4 * one[i]) << "step " << i;
}

class AsyncKVStoreCommand : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Kinds, AsyncKVStoreCommand, ::testing::Values("dist_async", "dist_bounded"),
                         [](const auto& test) { return std::string(test.param); });

// With one worker the order of updates is always the same.
TEST_P(AsyncKVStoreCommand, resumes_with_weights_and_optimizer_state_of_all_servers) {
  const TempFolder folder;
  const auto train = [&](const std::string& name, const Words& more) {
    const Ended ended = run(kvstore(GetParam()) +
                            Words{"--servers", "2", "--ranks", "1", "--split-above", "5000", "--batch-size", "16",
                                  "--momentum", "0.9", "--quiet", "--checkpoint-dir", folder / name} +
                            more);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
  };
  train("whole", {"--max-steps", "10"});
  train("parts", {"--max-steps", "4"});
  train("parts", {"--max-steps", "10", "--resume"});
  EXPECT_EQ(tensors_of(folder / "whole" / "step-00000010.safetensors"),
            tensors_of(folder / "parts" / "step-00000010.safetensors"));
}

TEST(KVStoreCommand, gives_servers_no_part_of_the_batch) {
  const Ended ended = run(kvstore("dist_sync") +
                          Words{"--servers", "4", "--ranks", "1", "--max-steps", "2", "--batch-size", "2", "--quiet"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
}

TEST(KVStoreCommand, local_says_what_it_chose_and_prints_the_table) {
  const Ended ended = run(kvstore("local") + Words{"--ranks", "2", "--max-steps", "3", "--batch-size", "16"});
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.error, "kvstore local is local_update_cpu: devices that are cores"));
  EXPECT_TRUE(
      contains(ended.output,
               "local_update_cpu               2         1                     8                    16           0"));
}

// Trained on the same samples, with the default optimizer: at most 1.5 points less.
TEST(KVStoreCommand, dist_async_learns_as_much_as_dist_sync_and_reports_the_delay) {
  const TempFolder folder;
  const auto accuracy = [&](const std::string& kind) {
    const Ended ended = run(kvstore(kind) + Words{"--ranks", "2", "--epochs", "1", "--metrics", folder / kind});
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    EXPECT_TRUE(contains(ended.output, "examples per update   max delay"));
    return metrics_in(folder / kind).back();
  };
  const auto sync = accuracy("dist_sync");
  const auto async = accuracy("dist_async");
  EXPECT_GT(async["max_delay"], 0);
  EXPECT_EQ(sync["max_delay"], 0);
  EXPECT_EQ(async["examples_per_update"], 128);
  EXPECT_EQ(sync["examples_per_update"], 256);
  EXPECT_EQ(sync["samples"], async["samples"]);
  EXPECT_GT(async["val_accuracy"].get<double>(), sync["val_accuracy"].get<double>() - 0.015);
  EXPECT_GT(sync["val_accuracy"].get<double>(), 0.5);
}

// LeNet with all defaults, also with a first worker whose steps take three times as long. With the full learning rate and
// one momentum for all, four workers diverge within 60 steps. `make soak` also compares the accuracy after some epochs.
struct Workers {
  std::string kind;
  int count;
  bool one_slow;
};
class AsyncLeNet : public ::testing::TestWithParam<Workers> {
 protected:
  std::vector<nlohmann::json> metrics_of(const std::string& kind, bool one_slow) const {
    const Words job = {
        LOCKSTEP_COMMAND, "run", "--servers", "1", "--nproc-per-node", std::to_string(GetParam().count + 1), "--"};
    const Words lenet = {SLOW_LENET,  "--threads", "1",       "--strategy", "kvstore",
                         "--kvstore", kind,        "--quiet", "--metrics",  folder_ / kind};
    const Words until = epochs_ > 0 ? Words{"--epochs", std::to_string(epochs_)} : Words{"--max-steps", "60"};
    const Ended ended = run(with_variables({{"SLOW_RANK", one_slow ? "1" : "none"}}, job + lenet + until),
                            6 * testing::kPatience + epochs_ * std::chrono::minutes(4));
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    return metrics_in(folder_ / kind);
  }
  double first_losses(const std::string& kind) const {
    const std::vector<double> losses = losses_in(folder_ / kind);
    return losses.size() < 60 ? NAN : std::accumulate(losses.begin(), losses.begin() + 60, 0.0) / 60;
  }

  int epochs_ = testing::rounds("LOCKSTEP_ASYNC_EPOCHS", 0);
  TempFolder folder_;
};
INSTANTIATE_TEST_SUITE_P(Workers, AsyncLeNet,
                         ::testing::Values(Workers{"dist_async", 4, false}, Workers{"dist_async", 2, true},
                                           Workers{"dist_bounded", 4, true}),
                         [](const auto& test) {
                           return concat(test.param.kind, "_", test.param.count,
                                         test.param.one_slow ? "_one_slow" : "");
                         });

TEST_P(AsyncLeNet, learns_as_dist_sync_does) {
  const auto sync = metrics_of("dist_sync", false).back();
  const auto async = metrics_of(GetParam().kind, GetParam().one_slow).back();
  EXPECT_LT(first_losses(GetParam().kind), 1.25 * first_losses("dist_sync"));
  EXPECT_GT(async["max_delay"], 0);
  if (epochs_ > 0) {
    EXPECT_GT(async["val_accuracy"].get<double>(), sync["val_accuracy"].get<double>() - 0.015);
  }
}

// ---- Lost ranks. `lockstep run` starts programs; their environment has their rank.

int parent_of(int pid) {
  const std::string stat = read_file(concat("/proc/", pid, "/stat"));
  return std::stoi(split(stat.substr(stat.rfind(')') + 2), ' ').at(1));
}

int pid_of_rank(int launcher, int rank) {
  const std::string wanted = concat("RANK=", rank);
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    int pid = 0;
    if (!parse_int(entry.path().filename().string(), pid)) continue;
    try {
      const auto variables = split(read_file(entry.path() / "environ"), '\0');
      if (std::ranges::find(variables, wanted) != variables.end() && parent_of(pid) == launcher) return pid;
    } catch (const SystemError&) {  // it has ended meanwhile
    }
  }
  return 0;
}

class KVStoreLoss : public ::testing::Test {
 protected:
  // One server, three workers.
  Words job(const std::string& kind, const Words& more) {
    return Words{LOCKSTEP_COMMAND, "run", "--servers", "1", "--nproc-per-node", "4", "--grace", "0.5"} +
           (kind == "dist_sync" ? Words{} : Words{"--workers-may-fail"}) + Words{"--"} + kvstore(kind) +
           Words{"--batch-size", "24", "--quiet", "--metrics", metrics()} + more;
  }
  std::string metrics() const { return folder.file("m.jsonl"); }

  void signal_rank(const Child& launcher, int rank, int number) {
    ASSERT_TRUE(testing::wait_until([&] { return steps_in(metrics()) >= 20; }));
    const int pid = pid_of_rank(launcher.pid(), rank);
    ASSERT_GT(pid, 0);
    since_signal.emplace();
    ASSERT_EQ(::kill(pid, number), 0);
  }

  TempFolder folder;
  std::optional<Stopwatch> since_signal;
};

TEST_F(KVStoreLoss, dist_sync_ends_with_a_clear_error_when_a_worker_is_killed) {
  Child launcher(job("dist_sync", {"--epochs", "1000"}));
  signal_rank(launcher, 2, SIGKILL);
  const Stopwatch watch;
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
  EXPECT_TRUE(contains(launcher.error(), "rank 2 was ended by signal 9"));
}

TEST_F(KVStoreLoss, dist_async_goes_on_when_a_worker_is_killed) {
  Child launcher(job("dist_async", {"--max-steps", "400"}));
  signal_rank(launcher, 2, SIGKILL);
  EXPECT_EQ(launcher.wait(), 0) << launcher.error();
  EXPECT_TRUE(contains(launcher.error(), "the other workers go on"));
  EXPECT_TRUE(contains(launcher.error(), "rank 2 was ended by signal 9 (Killed); the job goes on without it"));
  const auto last = metrics_in(metrics()).back();
  EXPECT_EQ(last["steps"], 400);
  EXPECT_GE(last["updates"], 800);
  EXPECT_LT(last["updates"], 1200);
}

TEST_F(KVStoreLoss, dist_bounded_goes_on_when_a_worker_hangs) {
  Child launcher(job("dist_bounded", {"--max-steps", "400", "--timeout", "2", "--staleness", "2"}));
  signal_rank(launcher, 3, SIGSTOP);
  EXPECT_EQ(launcher.wait(), 0) << launcher.error();
  EXPECT_GT(since_signal->seconds(), 1.5);  // it was waited for
  EXPECT_TRUE(contains(launcher.error(), "worker 2 (rank 3) is lost"));
  const auto last = metrics_in(metrics()).back();
  EXPECT_EQ(last["steps"], 400);
  EXPECT_LE(last["max_delay"], 2);
}

TEST_F(KVStoreLoss, ends_with_a_clear_error_when_the_server_is_killed) {
  Child launcher(job("dist_async", {"--epochs", "1000"}));
  signal_rank(launcher, 0, SIGKILL);
  const Stopwatch watch;
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
  EXPECT_TRUE(contains(launcher.error(), "rank 0 was ended by signal 9"));
}

}  // namespace
}  // namespace lockstep
