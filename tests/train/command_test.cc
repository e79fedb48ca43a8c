// SPDX-License-Identifier: Apache-2.0
// Starts `lockstep train` and a user's program: what they print, how they end, and the errors for common mistakes.

#include <signal.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "tests/launch/child.h"
#include "tests/support.h"
#include "tests/train/command.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Ended;
using testing::losses_in;
using testing::metrics_in;
using testing::run;
using testing::TempFolder;
using testing::with_variables;
using testing::operator+;
using testing::Words;

const Words kTrain = {LOCKSTEP_COMMAND, "train", "--threads", "1"};
const Words kProgram = {MISBEHAVING_TASK, "--threads", "1"};

void expect_close(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-4 * std::abs(b[i])) << "step " << i;
}

class StartedRanks : public ::testing::Test {
 protected:
  Words steps_into(const std::string& file) {
    return kTrain + Words{"--max-steps", "4", "--batch-size", "32", "--quiet", "--metrics", folder / file};
  }
  std::vector<double> losses_of_one_rank() {
    EXPECT_EQ(run(steps_into("one.jsonl")).exit_code, 0);
    return losses_in(folder / "one.jsonl");
  }
  TempFolder folder;
};

TEST_F(StartedRanks, train_as_one_rank_does_when_lockstep_starts_them) {
  const Ended ended = run(steps_into("three.jsonl") + Words{"--ranks", "3"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  expect_close(losses_in(folder / "three.jsonl"), losses_of_one_rank());
  EXPECT_EQ(metrics_in(folder / "three.jsonl").back()["ranks"], 3);
}

TEST_F(StartedRanks, train_as_one_rank_does_under_open_mpi) {
  const Words mpirun = {"mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"};
  const Ended ended = run(mpirun + steps_into("mpi.jsonl"));
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  expect_close(losses_in(folder / "mpi.jsonl"), losses_of_one_rank());
}

TEST_F(StartedRanks, train_as_one_rank_does_under_mpich) {
  const Ended ended = run(Words{"mpirun.mpich", "-np", "2"} + steps_into("mpi.jsonl"));
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  expect_close(losses_in(folder / "mpi.jsonl"), losses_of_one_rank());
}

TEST_F(StartedRanks, train_as_one_rank_does_under_lockstep_run) {
  const Words start = {LOCKSTEP_COMMAND, "run", "--nproc-per-node", "2", "--"};
  const Ended ended = run(start + steps_into("run.jsonl"));
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  expect_close(losses_in(folder / "run.jsonl"), losses_of_one_rank());
}

TEST_F(StartedRanks, smooth_labels_where_the_loss_is_cross_entropy) {
  EXPECT_EQ(run(steps_into("smooth.jsonl") + Words{"--label-smoothing", "0.5"}).exit_code, 0);
  EXPECT_NE(losses_in(folder / "smooth.jsonl"), losses_of_one_rank());
  const Ended ended = run(kProgram + Words{"--label-smoothing", "0.5"});
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.error, "--label-smoothing with perceptron"));
}

// Not even root can write there.
TEST_F(StartedRanks, need_no_folder_in_which_they_can_write) {
  Words as_root = {"unshare", "--mount"};
  if (::geteuid() != 0) as_root = as_root + Words{"--user", "--map-root-user"};
  const Words read_only = {"sh", "-c",
                           "mount --rbind /tmp /tmp && mount --options-mode=ignore --options-source=disable "
                           "-o \"remount,bind,$(findmnt -no VFS-OPTIONS /tmp | tail -1),ro\" /tmp && exec \"$@\"",
                           "sh"};
  const Words three_steps =
      kTrain + Words{"--max-steps", "3", "--batch-size", "32", "--quiet", "--data", "synthetic:96x1x28x28"};
  for (const Words& start : {Words{}, Words{LOCKSTEP_COMMAND, "run", "--nproc-per-node", "2", "--"}}) {
    const Words ranks = start.empty() ? Words{"--ranks", "2"} : Words{};
    const Ended ended =
        run(with_variables({{"XDG_RUNTIME_DIR", "/proc"}}, as_root + read_only + start + three_steps + ranks));
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
  }
}

TEST_F(StartedRanks, leave_nothing_behind_under_mpirun) {
  const TempFolder runtime;
  const Words mpirun = {"mpirun.mpich", "-np", "2"};
  const Ended ended = run(with_variables({{"XDG_RUNTIME_DIR", runtime.path()}}, mpirun + steps_into("mpi.jsonl")));
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_TRUE(std::filesystem::is_empty(runtime.path()));
}

TEST_F(StartedRanks, give_a_command_every_line_of_the_metrics) {
  const std::string cat = concat("cat > ", folder.file("events"));
  const Ended ended = run(steps_into("metrics.jsonl") + Words{"--ranks", "2", "--on-event", cat});
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.error, "");
  EXPECT_EQ(read_file(folder / "events"), read_file(folder / "metrics.jsonl"));
  const Ended without = run(kTrain + Words{"--max-steps", "4", "--batch-size", "32", "--quiet", "--on-event", cat});
  EXPECT_EQ(without.exit_code, 0) << without.error;
  EXPECT_EQ(losses_in(folder / "events"), losses_of_one_rank());
}

TEST_F(StartedRanks, train_as_usual_beside_a_broken_command) {
  const auto two_ranks = [&](const std::string& file) { return steps_into(file) + Words{"--ranks", "2"}; };
  EXPECT_EQ(run(two_ranks("expected.jsonl")).exit_code, 0);
  const std::map<std::string, std::string> broken = {
      {concat("echo $$ > ", folder.file("pid"), "; exec sleep 1000"), "still runs 5"},
      {"exit 3", "exited with code 3"},
      {"no-such-command", "exited with code 127"}};
  for (const auto& [command, warning] : broken) {
    const Ended ended = run(two_ranks("metrics.jsonl") + Words{"--on-event", command});
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    EXPECT_TRUE(contains(ended.error, warning)) << ended.error;
    EXPECT_EQ(losses_in(folder / "metrics.jsonl"), losses_in(folder / "expected.jsonl"));
  }
  const int pid = testing::pid_in(folder, "pid");
  ASSERT_TRUE(pid > 0 && testing::is_running(pid));
  ::kill(pid, SIGKILL);
}

TEST_F(StartedRanks, start_a_command_again_when_rank_0_is_replaced) {
  const Words command = {"--ranks", "2", "--max-restarts", "1", "--on-event", concat("cat >> ", folder.file("events"))};
  const Ended ended =
      run(with_variables({{"LOCKSTEP_FAULT", "rank=0,step=2,phase=update"}}, steps_into("metrics.jsonl") + command));
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  const auto lines = metrics_in(folder / "events");
  EXPECT_EQ(std::ranges::count_if(lines, [](const auto& line) { return line["event"] == "start"; }), 2);
  EXPECT_EQ(lines.back()["event"], "run");
}

TEST(Train, prints_a_table_with_a_line_per_epoch) {
  const TempFolder folder;
  const Ended ended = run(kProgram + Words{"--epochs", "2", "--batch-size", "1000", "--ranks", "2"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_TRUE(contains(ended.output, "epoch       time   samples/s   train loss   val loss   val accuracy"));
  EXPECT_TRUE(contains(ended.output, "\n      1  "));
  EXPECT_TRUE(contains(ended.output, "\n      2  "));
  EXPECT_TRUE(contains(ended.output, "done: 120 steps"));
}

TEST(Train, prints_nothing_when_quiet) {
  const Ended ended = run(kProgram + Words{"--epochs", "1", "--max-steps", "2", "--ranks", "2", "--quiet"});
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.output, "");
  EXPECT_EQ(ended.error, "");
}

TEST(Train, names_the_sample_whose_target_is_not_a_class) {
  for (const Words& ranks : {Words{"--ranks", "2"}, Words{"--strategy", "towers", "--ranks", "2"}}) {
    const Ended ended = run(
        kTrain + Words{"--model", "lenet", "--data", "synthetic:96x1x28x28?classes=12", "--classes", "10", "--quiet"} +
        ranks);
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_TRUE(contains(ended.error, "DataError: target "));
    EXPECT_TRUE(contains(ended.error, " is not one of the model's 10 classes"));
    EXPECT_TRUE(contains(ended.error, "of this rank's batch"));
    EXPECT_FALSE(contains(ended.error, "frame #"));
  }
}

TEST(Train, says_in_a_line_what_libtorch_says_with_a_backtrace) {
  const Ended ended = run(with_variables({{"MISBEHAVE", "shapes"}}, kProgram + Words{"--epochs", "1", "--quiet"}));
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "shapes cannot be multiplied"));
  EXPECT_FALSE(contains(ended.error, "frame #"));
}

TEST(Train, lists_every_strategy_in_its_help) {
  for (const char* help : {"--help", "--help-all"}) {
    const Ended ended = run({LOCKSTEP_COMMAND, "train", help});
    EXPECT_EQ(ended.exit_code, 0);
    for (const char* strategy : {"single", "ddp", "towers", "data_parallel", "kvstore", "averaging", "pipeline"})
      EXPECT_TRUE(contains(ended.output, concat("\n  ", strategy, " ")));
    EXPECT_EQ(contains(ended.output, "--lr-floor"), std::string(help) == "--help-all");
    const std::string table = ended.output.substr(ended.output.find("\n  strategy "));
    for (const std::string& line : split(table, '\n')) EXPECT_LE(line.size(), 80U) << line;
  }
}

class StartedStrategy : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Strategies, StartedStrategy,
                         ::testing::Values("towers", "data_parallel", "averaging", "pipeline"));

TEST_P(StartedStrategy, trains_on_two_devices_and_reports_them) {
  const TempFolder folder;
  const Ended ended = run(kTrain + Words{"--strategy", GetParam(), "--ranks", "2", "--max-steps", "2", "--batch-size",
                                         "16", "--quiet", "--metrics", folder / "m"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_EQ(ended.error, "");
  const auto last = metrics_in(folder / "m").back();
  EXPECT_EQ(last["devices"], (Words{"cpu:0", "cpu:1"}));
  EXPECT_EQ(last["ranks"], 2);
}

TEST(Train, runs_pipeline_stages_as_processes_and_saves_all_of_them) {
  const TempFolder folder;
  const auto train = [&](const std::string& metrics, const Words& more) {
    return run(kTrain +
               Words{"--strategy", "pipeline", "--ranks", "2", "--devices-per-worker", "1", "--stages", "0-1,2-3",
                     "--batch-size", "16", "--checkpoint-dir", folder / "checkpoints", "--checkpoint-every", "2",
                     "--quiet", "--metrics", folder / metrics} +
               more);
  };
  const Ended ended = train("one", {"--max-steps", "2"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_EQ(metrics_in(folder / "one").back()["stages"], 2);
  const Ended resumed = train("two", {"--max-steps", "4", "--resume"});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.error;
  EXPECT_EQ(losses_in(folder / "two").size(), 2U);
}

TEST(Train, averages_over_processes_with_several_devices_each) {
  const TempFolder folder;
  const Ended ended =
      run(kTrain + Words{"--strategy", "averaging", "--ranks", "2", "--devices-per-worker", "2", "--average-every", "2",
                         "--max-steps", "4", "--batch-size", "16", "--quiet", "--metrics", folder / "m"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  const auto last = metrics_in(folder / "m").back();
  EXPECT_EQ(last["ranks"], 4);
  EXPECT_EQ(last["averages"], 2);
  EXPECT_EQ(last["exchanged_bytes"], 2 * last["block_bytes"].get<double>());
}

TEST(Train, reads_options_from_a_toml_file) {
  const TempFolder folder;
  write_file(folder / "run.toml", concat("max-steps = 2\nquiet = true\nmetrics = \"", (folder / "m").string(), "\"\n"));
  EXPECT_EQ(run(kProgram + Words{"--config", folder / "run.toml"}).exit_code, 0);
  EXPECT_EQ(losses_in(folder / "m").size(), 2U);
}

TEST(Train, resumes_several_ranks_bit_exactly) {
  const TempFolder folder;
  const auto train = [&](const std::string& name, const Words& more) {
    const Ended ended =
        run(kProgram +
            Words{"--ranks", "2", "--batch-size", "500", "--epochs", "1", "--quiet", "--metrics",
                  folder / (name + ".jsonl"), "--checkpoint-dir", folder / name, "--checkpoint-every", "4"} +
            more);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
  };
  train("whole", {"--max-steps", "12"});
  train("parts", {"--max-steps", "5"});
  train("parts", {"--max-steps", "12", "--resume"});
  const std::string last = "step-00000012.safetensors";
  EXPECT_EQ(losses_in(folder / "whole.jsonl").back(), losses_in(folder / "parts.jsonl").back());
  // Seconds differ between the runs, and with them the metadata; the tensors may not.
  const std::string a = read_file(folder / "whole" / last);
  const std::string b = read_file(folder / "parts" / last);
  const auto tensors = [](const std::string& bytes) {
    return bytes.substr(8 + *reinterpret_cast<const uint64_t*>(bytes.data()));
  };
  EXPECT_EQ(tensors(a), tensors(b));
}

// A limit on the size of files, in blocks of 512 bytes, instead of a full disk.
TEST(Train, goes_on_while_no_checkpoint_can_be_written_and_ends_with_an_error) {
  const TempFolder folder;
  const Ended ended = run(Words{"/bin/sh", "-c", "trap '' XFSZ; ulimit -f 100; exec \"$@\"", "sh"} + kTrain +
                          Words{"--max-steps", "4", "--batch-size", "16", "--quiet", "--checkpoint-dir",
                                folder / "checkpoints", "--checkpoint-every", "2", "--metrics", folder / "m"});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "the checkpoint of step 2 is not saved: can't write"));
  EXPECT_TRUE(contains(ended.error, "the checkpoint of the last step, 4, is not saved: can't write"));
  EXPECT_EQ(losses_in(folder / "m").size(), 4U);
  EXPECT_EQ(metrics_in(folder / "m").back()["event"], "run");
}

// ---- What a user does wrong, and what the error says.

TEST(Mistake, no_such_data) {
  const Ended folder = run(kTrain + Words{"--data-dir", "/no/such/folder", "--ranks", "2"});
  EXPECT_EQ(folder.exit_code, 1);
  EXPECT_TRUE(contains(folder.error, "can't open /no/such/folder/train-images-idx3-ubyte.gz"));
  EXPECT_TRUE(contains(folder.error, "dataset-fashion-mnist"));
  const Ended name = run(kTrain + Words{"--data", "imagenet"});
  EXPECT_EQ(name.exit_code, 2);
  EXPECT_TRUE(contains(name.error, "--data imagenet: there is no such value"));
}

TEST(Mistake, no_such_model) {
  const Ended ended = run(kTrain + Words{"--model", "lennet", "--ranks", "2"});
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.error, "--model lennet: there is no such value"));
  EXPECT_TRUE(contains(ended.error, "lenet"));
}

TEST(Mistake, no_such_strategy_or_option) {
  EXPECT_EQ(run(kTrain + Words{"--strategy", "horovod"}).exit_code, 2);
  EXPECT_EQ(run(kTrain + Words{"--no-such-option"}).exit_code, 2);
  EXPECT_EQ(run(kTrain + Words{"--ranks", "many"}).exit_code, 2);
  EXPECT_EQ(run(kTrain + Words{"--resume"}).exit_code, 2);
}

TEST(Mistake, batch_smaller_than_ranks) {
  const Ended ended = run(kTrain + Words{"--batch-size", "3", "--ranks", "4"});
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.error, "--batch-size 3 is smaller than the number of ranks, 4"));
}

TEST(Mistake, unwritable_checkpoint_folder) {
  const Ended ended = run(kTrain + Words{"--checkpoint-dir", "/proc/checkpoints", "--ranks", "2"});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "can't write checkpoints into /proc/checkpoints"));
}

TEST(Mistake, no_gpu) {
  const Ended ended =
      run(with_variables({{"CUDA_VISIBLE_DEVICES", ""}}, kTrain + Words{"--device", "cuda", "--max-steps", "1"}));
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "DeviceError"));
}

TEST(Mistake, rank_0_is_missing) {
  const Ended ended = run(with_variables({{"RANK", "1"},
                                          {"WORLD_SIZE", "2"},
                                          {"LOCAL_RANK", "1"},
                                          {"LOCAL_WORLD_SIZE", "2"},
                                          {"MASTER_ADDR", "127.0.0.1"},
                                          {"MASTER_PORT", "9"}},
                                         kTrain + Words{"--timeout", "0.5"}));
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "rank 1 found no rank 0 of 127.0.0.1:9 on this machine"));
}

TEST(Mistake, a_master_address_that_other_machines_cannot_reach) {
  const Ended ended = run(with_variables({{"RANK", "1"},
                                          {"WORLD_SIZE", "2"},
                                          {"LOCAL_RANK", "0"},
                                          {"LOCAL_WORLD_SIZE", "1"},
                                          {"MASTER_ADDR", "localhost"},
                                          {"MASTER_PORT", "9"}},
                                         kTrain));
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "MASTER_ADDR=localhost is a loopback address here"));
}

TEST(Mistake, incomplete_launcher_variables) {
  const Ended ended = run(with_variables({{"RANK", "1"}, {"WORLD_SIZE", "2"}}, kTrain));
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "MASTER_ADDR"));
}

Ended run_misbehaving(const std::string& how) {
  return run(with_variables({{"MISBEHAVE", how}}, kProgram + Words{"--ranks", "3", "--max-steps", "50", "--quiet"}));
}

TEST(Mistake, a_rank_that_exits_with_3) {
  const Ended ended = run_misbehaving("exit");
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_TRUE(contains(ended.error, "rank 1 exited with code 3"));
}

TEST(Mistake, a_rank_that_is_killed) {
  const Ended ended = run_misbehaving("kill");
  EXPECT_EQ(ended.exit_code, 128 + 9);
  EXPECT_TRUE(contains(ended.error, "rank 1"));
  EXPECT_TRUE(contains(ended.error, "signal 9"));
}

TEST(Mistake, models_that_differ_between_ranks) {
  const Ended ended = run_misbehaving("other_model");
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "rank 0 and rank 1 differ at tensor 0: 0.weight float[16, 784]"));
  EXPECT_TRUE(contains(ended.error, "0.weight float[17, 784]"));
}

TEST(Mistake, a_learning_rate_that_makes_the_loss_nan) {
  const TempFolder folder;
  const Ended ended = run(kProgram + Words{"--ranks", "2", "--lr", "1e30", "--checkpoint-dir", folder.path(),
                                           "--checkpoint-every", "1", "--quiet"});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "NonFiniteError"));
  EXPECT_TRUE(contains(ended.error, "step 1"));
  EXPECT_TRUE(contains(ended.error, "weight"));
}

}  // namespace
}  // namespace lockstep
