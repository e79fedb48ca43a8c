// SPDX-License-Identifier: Apache-2.0
// `lockstep train` and `lockstep env` with devices that are simulated GPUs (docs/design/simulated-cuda.md), or with the cuda
// preset those of this machine.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>

#include <nlohmann/json.hpp>

#include "lockstep/base/text.h"
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
using testing::Words;

const std::string kCommand = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "lockstep";

#ifdef SIMULATED_CUDA
const std::string kData = "fashion-mnist";
#else
const std::string kData = "synthetic:3000x1x28x28";  // a machine with GPUs may have no other
#endif

const Words kTrain = {kCommand, "train",        "--data", kData,     "--threads",  "1", "--max-steps",
                      "4",      "--batch-size", "30",     "--quiet", "--momentum", "0", "--metrics"};

const Words kProcesses = {"--ranks", "2", "--devices-per-worker", "1", "--devices", "cuda"};

#ifdef SIMULATED_CUDA
const std::string kTwoGpus = "cuda:0,cuda:1";

Words with_gpus(int gpus, const Words& words) {
  return with_variables({{"LD_PRELOAD", SIMULATED_CUDA}, {"LOCKSTEP_SIMULATED_GPUS", std::to_string(gpus)}}, words);
}
#else
const std::string kTwoGpus = std::filesystem::exists("/dev/nvidia1") ? "cuda:0,cuda:1" : "cuda:0,cuda:0";

Words with_gpus(int, const Words& words) { return words; }
#endif

Ended on_gpus(int gpus, const Words& words) { return run(with_gpus(gpus, words)); }

struct Arrangement {
  std::string name;
  Words words;
  int in_second_step = 0;  // the number of an operator or copy of cuda:1 in forward or backward of the second step
};
void PrintTo(const Arrangement& arrangement, std::ostream* out) { *out << arrangement.name; }

class GpuStrategy : public ::testing::TestWithParam<Arrangement> {};
INSTANTIATE_TEST_SUITE_P(
    Strategies, GpuStrategy,
    ::testing::Values(
        Arrangement{"towers", {"--strategy", "towers"}},
        Arrangement{"towers_update_cpu", {"--strategy", "towers", "--update", "cpu"}},
        Arrangement{"data_parallel", {"--strategy", "data_parallel"}},
        Arrangement{"averaging", {"--strategy", "averaging"}},
        Arrangement{"kvstore_update_cpu", {"--strategy", "kvstore", "--kvstore", "local_update_cpu"}},
        Arrangement{"kvstore_allreduce_cpu", {"--strategy", "kvstore", "--kvstore", "local_allreduce_cpu"}},
        Arrangement{"kvstore_allreduce_device", {"--strategy", "kvstore", "--kvstore", "local_allreduce_device"}}),
    [](const auto& test) { return test.param.name; });

TEST_P(GpuStrategy, trains_on_two_as_one_core_does) {
  const TempFolder folder;
  EXPECT_EQ(run(kTrain + Words{folder / "one"}).exit_code, 0);
  const Ended ended = on_gpus(2, kTrain + Words{folder / "two", "--devices", kTwoGpus} + GetParam().words);
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  const auto one = losses_in(folder / "one"), two = losses_in(folder / "two");
  ASSERT_EQ(one.size(), 4U);
  ASSERT_EQ(two.size(), 4U);
  for (size_t step = 0; step < one.size(); ++step) EXPECT_NEAR(two[step], one[step], 1e-4 * one[step]) << step;
  const bool twice = kTwoGpus == "cuda:0,cuda:0";
  EXPECT_EQ(metrics_in(folder / "two").back()["devices"], (Words{"cuda:0", twice ? "cuda:0 (device 1)" : "cuda:1"}));
}

// Bytes between host and device in one step, both directions, by device.
std::map<int, std::pair<int64_t, int64_t>> crossing(const Words& words) {
  const TempFolder folder;
  std::map<int, std::pair<int64_t, int64_t>> bytes;
  for (const int steps : {4, 2}) {
    const std::string file = folder / std::to_string(steps);
    Words train = kTrain + Words{folder / "metrics", "--devices", "cuda:0,cuda:1"} + words;
    *std::next(std::ranges::find(train, "--max-steps")) = std::to_string(steps);
    EXPECT_EQ(on_gpus(2, with_variables({{"LOCKSTEP_SIMULATED_COUNTERS", file}}, train)).exit_code, 0);
    for (const auto& line : metrics_in(file)) {
      auto& [up, down] = bytes[line["device"]];
      up += (steps == 4 ? 1 : -1) * line["host_to_device"].get<int64_t>();
      down += (steps == 4 ? 1 : -1) * line["device_to_host"].get<int64_t>();
    }
  }
  for (auto& [device, both] : bytes) both = {both.first / 2, both.second / 2};
  return bytes;
}

// As simulated_cuda_test says of a step of each strategy (BytesOfDevices), and the training loop adds nothing. LeNet's parameters
// take kModel bytes, a device's part of the batch kBatch.
TEST(GpuCommand, moves_no_other_bytes_over_the_host) {
  constexpr int64_t kModel = 516'272, kBatch = 15 * (28 * 28 * 4 + 8), kLoss = 4;
  for (const int64_t over_host : {int64_t{0}, kModel}) {
    const auto bytes = crossing({"--strategy", "towers", "--update", over_host > 0 ? "cpu" : "device"});
    ASSERT_EQ(bytes.size(), 2U);
    for (const auto& [device, both] : bytes) {
      EXPECT_EQ(both.first, kBatch + over_host) << device;
      EXPECT_EQ(both.second, kLoss + over_host) << device;
    }
  }
}

TEST(GpuCommand, trains_on_one_gpu) {
  const TempFolder folder;
  EXPECT_EQ(run(kTrain + Words{folder / "core"}).exit_code, 0);
  const Ended ended = on_gpus(2, kTrain + Words{folder / "gpu", "--strategy", "single", "--devices", "cuda:1"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  const auto core = losses_in(folder / "core"), gpu = losses_in(folder / "gpu");
  ASSERT_EQ(core.size(), gpu.size());
  for (size_t step = 0; step < core.size(); ++step) EXPECT_NEAR(gpu[step], core[step], 1e-4 * core[step]) << step;
  EXPECT_EQ(metrics_in(folder / "gpu").back()["devices"], Words{"cuda:1"});
}

// Gradients go over the simulator of NCCL.
TEST(GpuCommand, trains_with_a_process_per_gpu_as_one_core_does) {
  const TempFolder folder;
  EXPECT_EQ(run(kTrain + Words{folder / "core"}).exit_code, 0);
  const Ended ended =
      on_gpus(2, kTrain + Words{folder / "gpus", "--strategy", "ddp", "--ranks", "2", "--devices", "cuda"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  const auto core = losses_in(folder / "core"), gpus = losses_in(folder / "gpus");
  ASSERT_EQ(core.size(), gpus.size());
  for (size_t step = 0; step < core.size(); ++step) EXPECT_NEAR(gpus[step], core[step], 1e-4 * core[step]) << step;
}

// In one process, and with a process for each.
TEST(GpuCommand, trains_a_pipeline_on_gpus_as_one_core_does) {
  const TempFolder folder;
  EXPECT_EQ(run(kTrain + Words{folder / "core"}).exit_code, 0);
  const auto core = losses_in(folder / "core");
  const Words one_process = {"--strategy", "pipeline", "--devices", "cuda:0,cuda:1"};
  for (const Words& devices : {one_process, one_process + Words{"--devices-per-worker", "1"}})
    for (const char* schedule : {"1f1b", "gpipe"}) {
      const Ended ended =
          on_gpus(2, kTrain + Words{folder / "gpus", "--pipeline-schedule", schedule, "--ranks", "2"} + devices);
      EXPECT_EQ(ended.exit_code, 0) << ended.error;
      const auto gpus = losses_in(folder / "gpus");
      ASSERT_EQ(core.size(), gpus.size());
      for (size_t step = 0; step < core.size(); ++step) EXPECT_NEAR(gpus[step], core[step], 1e-4 * core[step]);
    }
}

// Any number of GPUs, and cores, go on from the same checkpoint.
TEST(GpuCommand, resumes_a_pipeline_of_one_process) {
  const TempFolder folder;
  const auto train = [&](const std::string& steps, const Words& more) {
    Words words = kTrain + Words{folder / steps, "--strategy", "pipeline", "--optimizer", "adamw", "--lr", "0.001"};
    *std::next(std::ranges::find(words, "--max-steps")) = steps;
    const auto momentum = std::ranges::find(words, "--momentum");  // adamw has none
    words.erase(momentum, momentum + 2);
    const Ended ended = on_gpus(3, words + more);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    return losses_in(folder / steps);
  };
  const auto all = train("4", {"--devices", "cpu", "--ranks", "2"});
  const Words saved = {"--checkpoint-every", "1", "--checkpoint-dir", folder / "checkpoints"};
  train("1", saved + Words{"--devices", "cuda:0,cuda:1"});
  auto resumed = train("2", saved + Words{"--devices", "cuda:0,cuda:1,cuda:2", "--resume"});
  const auto on_cores = train("3", saved + Words{"--devices", "cpu", "--ranks", "2", "--resume"});
  resumed.insert(resumed.end(), on_cores.begin(), on_cores.end());
  ASSERT_EQ(all.size(), 4U);
  ASSERT_EQ(resumed.size(), 2U);
  for (size_t i = 0; i < resumed.size(); ++i) EXPECT_NEAR(resumed[i], all[i + 1], 1e-4 * all[i + 1]) << i;
}

// Block 0 of each process goes over the host.
TEST(GpuCommand, averages_over_processes_as_one_core_trains) {
  const TempFolder folder;
  EXPECT_EQ(run(kTrain + Words{folder / "core"}).exit_code, 0);
  const Ended ended = on_gpus(4, kTrain + Words{folder / "gpus", "--strategy", "averaging", "--ranks", "2",
                                                "--devices-per-worker", "2", "--devices", "cuda"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  const auto core = losses_in(folder / "core"), gpus = losses_in(folder / "gpus");
  ASSERT_EQ(core.size(), gpus.size());
  for (size_t step = 0; step < core.size(); ++step) EXPECT_NEAR(gpus[step], core[step], 1e-4 * core[step]) << step;
}

TEST(GpuCommand, learns_with_workers_at_their_own_pace) {
  const TempFolder folder;
  for (const char* kind : {"dist_async", "dist_bounded"}) {
    Words train = kTrain + Words{folder / "gpus",        "--strategy", "kvstore",   "--kvstore", kind,   "--ranks", "2",
                                 "--devices-per-worker", "1",          "--devices", "cuda",      "--lr", "0.1"};
    *std::next(std::ranges::find(train, "--max-steps")) = "60";
    const Ended ended = on_gpus(2, train);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    const auto losses = losses_in(folder / "gpus");
    ASSERT_GE(losses.size(), 20U);
    const auto mean = [&](auto from) { return std::accumulate(from, from + 10, 0.0) / 10; };
    EXPECT_LT(mean(losses.end() - 10), 0.9 * mean(losses.begin())) << kind;
  }
}

// Each is a process with a GPU; the second one's has the fault.
class GpuOfAProcess : public ::testing::TestWithParam<Arrangement> {
 protected:
  static Ended with(const std::string& fault) {
    const TempFolder folder;
    const Words train = kTrain + Words{folder / "m", "--devices", "cuda", "--ranks", "2", "--timeout", "6"};
    return on_gpus(2, with_variables({{"LOCKSTEP_SIMULATED_FAULTS", fault}}, train + GetParam().words));
  }
};
INSTANTIATE_TEST_SUITE_P(
    Strategies, GpuOfAProcess,
    ::testing::Values(
        Arrangement{"ddp", {"--strategy", "ddp"}, 101},
        Arrangement{"pipeline", {"--strategy", "pipeline", "--devices-per-worker", "1"}, 200},
        Arrangement{"averaging", {"--strategy", "averaging", "--devices-per-worker", "1"}, 72},
        Arrangement{"dist_sync", {"--strategy", "kvstore", "--kvstore", "dist_sync", "--devices-per-worker", "1"}, 80}),
    [](const auto& test) { return test.param.name; });

TEST_P(GpuOfAProcess, is_named_if_it_fails_hangs_or_has_no_memory_left) {
  for (const auto& [kind, message] : std::map<std::string, std::string>{{"operator", "cuda:1 failed: CUDA error"},
                                                                        {"memory", "cuda:1 failed: CUDA out of memory"},
                                                                        {"hang", "cuda:1 is not done within 4.5 s"}}) {
    const std::string fault = concat(kind, "@1:", kind == "hang" ? GetParam().in_second_step : 90);
    const Ended ended = with(fault);
    EXPECT_NE(ended.exit_code, 0) << fault;
    // A server ends the job as soon as it has lost a worker, perhaps before that one has said why.
    const bool by_server = contains(ended.error, "worker 1 (rank 2) is lost");
    EXPECT_TRUE(by_server || contains(ended.error, message)) << fault << '\n' << ended.error;
  }
}

// Where nothing else catches it: as the model is made, as a batch comes, as replicas are averaged.
struct Fault {
  std::string name;
  std::string fault;
  std::string message;
  Words words;
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

class ErrorOutsideAStep : public ::testing::TestWithParam<Fault> {};
INSTANTIATE_TEST_SUITE_P(
    Strategies, ErrorOutsideAStep,
    ::testing::Values(
        Fault{"memory_of_single", "memory@0:2", "cuda:0 failed: CUDA out of memory", {"--devices", "cuda:0"}},
        Fault{"copy_of_single", "copy@0:10", "cuda:0 failed: CUDA error", {"--devices", "cuda:0"}},
        Fault{"memory_of_ddp", "memory@1:2", "cuda:1 failed: CUDA out of memory", {"--strategy", "ddp"}},
        Fault{"memory_of_a_stage", "memory@1:2", "cuda:1 failed: CUDA out of memory",
              kProcesses + Words{"--strategy", "pipeline"}},
        Fault{"memory_of_towers", "memory@1:2", "cuda:1 failed: CUDA out of memory", {"--strategy", "towers"}},
        Fault{"copy_of_averaging", "copy@1:10", "failed: CUDA error", {"--strategy", "averaging"}},
        Fault{"copy_of_data_parallel", "copy@1:10", "failed: CUDA error", {"--strategy", "data_parallel"}},
        Fault{"copy_of_local_update_cpu",
              "copy@1:10",
              "cuda:1 failed: CUDA error",
              {"--strategy", "kvstore", "--kvstore", "local_update_cpu"}}),
    [](const auto& test) { return test.param.name; });

TEST_P(ErrorOutsideAStep, names_the_gpu_and_what_to_do) {
  const TempFolder folder;
  Words train = kTrain + Words{folder / "m", "--timeout", "10"} + GetParam().words;
  if (std::ranges::count(train, "--devices") == 0) train = train + Words{"--devices", "cuda"};
  const Ended ended = on_gpus(2, with_variables({{"LOCKSTEP_SIMULATED_FAULTS", GetParam().fault}}, train));
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.error, GetParam().message));
  EXPECT_TRUE(contains(ended.error, "next:"));
  EXPECT_FALSE(contains(ended.error, "frame #"));
}

// A run in two parts has the losses of one that went on. Each strategy saves and reads its optimizer's state.
class CheckpointOnGpus : public ::testing::TestWithParam<Arrangement> {};
INSTANTIATE_TEST_SUITE_P(
    Strategies, CheckpointOnGpus,
    ::testing::Values(Arrangement{"single", {"--strategy", "single", "--devices", "cuda:1"}},
                      Arrangement{"ddp", {"--strategy", "ddp", "--devices", "cuda"}},
                      Arrangement{"virtual_shards",
                                  {"--strategy", "ddp", "--devices", "cuda", "--virtual-shards", "4"}},
                      Arrangement{"towers", {"--strategy", "towers", "--devices", "cuda"}},
                      Arrangement{"averaging", {"--strategy", "averaging", "--devices", "cuda"}},
                      Arrangement{"averaging_in_processes", kProcesses + Words{"--strategy", "averaging"}},
                      Arrangement{"dist_sync", kProcesses + Words{"--strategy", "kvstore", "--kvstore", "dist_sync"}},
                      Arrangement{"pipeline", kProcesses + Words{"--strategy", "pipeline"}}),
    [](const auto& test) { return test.param.name; });

TEST_P(CheckpointOnGpus, is_resumed_as_if_it_had_gone_on) {
  const TempFolder folder;
  const Words one = {kCommand,
                     "train",
                     "--model",
                     "mlp",
                     "--data",
                     "synthetic:300x1x28x28",
                     "--optimizer",
                     "adamw",
                     "--lr",
                     "0.001",
                     "--batch-size",
                     "30",
                     "--threads",
                     "1",
                     "--quiet",
                     "--timeout",
                     "15",
                     "--checkpoint-every",
                     "2"};
  const auto train = [&](const std::string& name, const std::string& steps, const Words& more = {}) {
    const Words files = {"--metrics", folder / name, "--checkpoint-dir", folder / (name + ".d")};
    const Ended ended = on_gpus(2, one + Words{"--max-steps", steps} + files + GetParam().words + more);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
  };
  train("whole", "4");
  train("parts", "2");
  train("parts", "4", {"--resume"});
  const auto whole = losses_in(folder / "whole"), parts = losses_in(folder / "parts");
  ASSERT_EQ(whole.size(), 4U);
  ASSERT_EQ(parts.size(), 4U);
  for (size_t step = 0; step < whole.size(); ++step) EXPECT_NEAR(parts[step], whole[step], 1e-6 * whole[step]) << step;
}

// Each rank, under a launcher, calls its own GPU cuda:0.
TEST(GpuCommand, takes_the_gpu_that_each_rank_sees) {
  const TempFolder folder;
  const auto start = [&](const std::string& rank) {
    const Words words = kTrain + Words{folder / "m", "--strategy", "ddp"};
    return std::make_unique<Child>(
        with_gpus(2, with_variables({{"CUDA_VISIBLE_DEVICES", rank},
                                     {"OMPI_COMM_WORLD_RANK", rank},
                                     {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
                                     {"OMPI_COMM_WORLD_SIZE", "2"},
                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                     {"PMIX_NAMESPACE", concat("gpu_command_test.", ::getpid())}},
                                    words)));
  };
  const auto first = start("0"), second = start("1");
  EXPECT_EQ(first->wait(), 0) << first->error();
  EXPECT_EQ(second->wait(), 0) << second->error();
  const auto run = metrics_in(folder / "m").back();
  EXPECT_EQ(run["devices"], Words{"cuda:0"});
  EXPECT_EQ(run["ranks"], 2);
}

TEST(GpuCommand, trains_with_servers_as_one_core_does) {
  const TempFolder folder;
  EXPECT_EQ(run(kTrain + Words{folder / "core"}).exit_code, 0);
  const auto core = losses_in(folder / "core");
  for (const char* in_store : {"true", "false"}) {
    const Ended ended =
        on_gpus(4, kTrain + Words{folder / "gpus", "--strategy", "kvstore", "--kvstore", "dist_sync", "--ranks", "2",
                                  "--devices-per-worker", "2", "--devices", "cuda", "--update-on-kvstore", in_store});
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    const auto gpus = losses_in(folder / "gpus");
    ASSERT_EQ(core.size(), gpus.size());
    for (size_t step = 0; step < core.size(); ++step) EXPECT_NEAR(gpus[step], core[step], 1e-4 * core[step]);
  }
}

// Every strategy, kinds of the server and schedules included. --ranks counts processes where --devices-per-worker is given.
class StrategyOnGpus : public ::testing::TestWithParam<Arrangement> {};
INSTANTIATE_TEST_SUITE_P(
    Strategies, StrategyOnGpus,
    ::testing::Values(
        Arrangement{"single", {"--strategy", "single", "--devices", "cuda:1"}},
        Arrangement{"ddp", {"--strategy", "ddp", "--ranks", "2", "--devices", "cuda"}},
        Arrangement{"towers", {"--strategy", "towers", "--devices", "cuda"}},
        Arrangement{"data_parallel", {"--strategy", "data_parallel", "--devices", "cuda"}},
        Arrangement{"averaging", {"--strategy", "averaging", "--devices", "cuda"}},
        Arrangement{"averaging_in_processes", kProcesses + Words{"--strategy", "averaging"}},
        Arrangement{"local", {"--strategy", "kvstore", "--kvstore", "local", "--devices", "cuda"}},
        Arrangement{"local_update_cpu",
                    {"--strategy", "kvstore", "--kvstore", "local_update_cpu", "--devices", "cuda"}},
        Arrangement{"local_allreduce_cpu",
                    {"--strategy", "kvstore", "--kvstore", "local_allreduce_cpu", "--devices", "cuda"}},
        Arrangement{"local_allreduce_device",
                    {"--strategy", "kvstore", "--kvstore", "local_allreduce_device", "--devices", "cuda"}},
        Arrangement{"dist_sync", kProcesses + Words{"--strategy", "kvstore", "--kvstore", "dist_sync"}},
        Arrangement{"dist_async", kProcesses + Words{"--strategy", "kvstore", "--kvstore", "dist_async"}},
        Arrangement{"dist_bounded", kProcesses + Words{"--strategy", "kvstore", "--kvstore", "dist_bounded"}},
        Arrangement{"pipeline_in_one_process", {"--strategy", "pipeline", "--devices", "cuda"}},
        Arrangement{"pipeline", kProcesses + Words{"--strategy", "pipeline"}},
        Arrangement{"gpipe", kProcesses + Words{"--strategy", "pipeline", "--pipeline-schedule", "gpipe"}}),
    [](const auto& test) { return test.param.name; });

TEST_P(StrategyOnGpus, learns) {
  const TempFolder folder;
  const Words train = {kCommand,    "train", "--model", "mlp",       "--data",       "synthetic:300x1x28x28",
                       "--epochs",  "2",     "--lr",    "0.05",      "--batch-size", "30",
                       "--threads", "1",     "--quiet", "--metrics", folder / "m"};
  const Ended ended = on_gpus(2, train + GetParam().words);
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  std::vector<double> losses;
  for (const auto& line : metrics_in(folder / "m"))
    if (line["event"] == "epoch") losses.push_back(line["train_loss"]);
  ASSERT_EQ(losses.size(), 2U);
  EXPECT_LT(losses[1], 0.5 * losses[0]);
}

// The parameters of gpt-mini, their gradients and AdamW's state are 12.9 MiB, those of a stage at most 4.
TEST(GpuCommand, trains_a_model_above_the_memory_of_a_gpu_in_four_stages) {
  const TempFolder folder;
  const Words train = {kCommand,      "train", "--model", "gpt-mini",  "--data",      "synthetic",
                       "--optimizer", "adamw", "--lr",    "0.001",     "--max-steps", "3",
                       "--threads",   "1",     "--quiet", "--strategy"};
  const Words pipeline = train + Words{"pipeline", "--batch-size", "4", "--micro-batches", "4", "--metrics"};
  const auto with_12_mib = [](const Words& words) {
    return on_gpus(4, with_variables({{"LOCKSTEP_SIMULATED_MEMORY", "12"}}, words));
  };
  const Ended one = with_12_mib(train + Words{"single", "--devices", "cuda:0", "--batch-size", "1"});
  EXPECT_EQ(one.exit_code, 1);
  EXPECT_TRUE(contains(one.error, "cuda:0 failed: CUDA out of memory")) << one.error;
  EXPECT_TRUE(contains(one.error, "or cut the model: --strategy pipeline")) << one.error;

  // One device without the limit, and the same random numbers for dropout.
  EXPECT_EQ(run(pipeline + Words{folder / "core", "--devices", "cpu", "--ranks", "1"}).exit_code, 0);
  const auto core = losses_in(folder / "core");
  ASSERT_EQ(core.size(), 3U);
  const Words in_one_process = {"--devices", "cuda", "--ranks", "4", "--stages", "0-1,2,3,4-5"};
  for (const Words& arrangement : {in_one_process, in_one_process + Words{"--devices-per-worker", "1"}}) {
    const Ended four = with_12_mib(pipeline + Words{folder / "gpus"} + arrangement);
    EXPECT_EQ(four.exit_code, 0) << four.error;
    const double bytes = metrics_in(folder / "gpus").back()["stage_0_bytes"];  // of its GPU, not of the host
    EXPECT_GT(bytes, 3 << 20);
    EXPECT_LT(bytes, 12 << 20);
    const auto gpus = losses_in(folder / "gpus");
    ASSERT_EQ(gpus.size(), 3U);
    for (size_t step = 0; step < core.size(); ++step) EXPECT_NEAR(gpus[step], core[step], 1e-5 * core[step]) << step;
  }
}

TEST(GpuCommand, takes_all_gpus_or_as_many_as_ranks) {
  const TempFolder folder;
  const Words towers = kTrain + Words{folder / "m", "--strategy", "towers"};
  const auto devices = [&](const Words& more) {
    const Ended ended = on_gpus(3, towers + more);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    return metrics_in(folder / "m").back()["devices"];
  };
  EXPECT_EQ(devices({"--devices", "cuda"}), (Words{"cuda:0", "cuda:1", "cuda:2"}));
  EXPECT_EQ(devices({"--ranks", "auto"}), (Words{"cuda:0", "cuda:1", "cuda:2"}));
  EXPECT_EQ(devices({"--ranks", "2"}), (Words{"cuda:0", "cuda:1"}));
  EXPECT_EQ(devices({"--devices", "cuda:2,cuda:2"}), (Words{"cuda:2", "cuda:2 (device 1)"}));
  EXPECT_EQ(devices({"--devices", "cpu", "--ranks", "2"}), (Words{"cpu:0", "cpu:1"}));
  EXPECT_EQ(on_gpus(3, kTrain + Words{folder / "m", "--strategy", "ddp", "--ranks", "auto"}).exit_code, 0);
  EXPECT_EQ(metrics_in(folder / "m").back()["ranks"], 3);
}

TEST(GpuCommand, says_what_is_wrong_with_devices) {
  const TempFolder folder;
  const auto refusal = [&](const Words& more) {
    const Ended ended = on_gpus(2, kTrain + Words{folder / "m", "--strategy"} + more);
    EXPECT_NE(ended.exit_code, 0);
    return ended.error;
  };
  EXPECT_TRUE(contains(refusal({"towers", "--devices", "cuda:0,cuda:5"}), "there is no GPU cuda:5: 2 visible"));
  EXPECT_TRUE(contains(refusal({"towers", "--devices", "cuda:0,cuda:1", "--ranks", "3"}), "--ranks 3 with 2 devices"));
  EXPECT_TRUE(contains(refusal({"towers", "--devices", "cuda:0", "--device", "cpu"}), "with another --device"));
  EXPECT_TRUE(contains(refusal({"single", "--devices", "cuda:0,cuda:1"}), "the ranks of this machine have 1"));
  EXPECT_TRUE(contains(refusal({"ddp", "--devices", "cuda:1,cuda:1"}), "cuda:1 is named twice"));
  EXPECT_TRUE(contains(refusal({"ddp", "--devices", "cuda", "--ranks", "3"}), "there is no GPU cuda:2: 2 visible"));
}

TEST(GpuCommand, lists_gpus_with_memory_and_links) {
  const Ended ended = on_gpus(2, {kCommand, "env"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_TRUE(contains(ended.output, "cuda:1  16.0 GiB free of 16.0 GiB, reaches cuda:0"));
}

}  // namespace
}  // namespace lockstep
