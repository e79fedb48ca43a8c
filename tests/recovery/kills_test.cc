// SPDX-License-Identifier: Apache-2.0
// Ranks that are killed at random points of a run, whose outcome must be that of the undisturbed run, bit for bit.
// LOCKSTEP_KILLS: how many; LOCKSTEP_KILLS_SEED: those of an earlier run, whose output names its seed.
#include <algorithm>
#include <iostream>
#include <random>

#include "tests/recovery/jobs.h"

namespace lockstep {
namespace {

using testing::Job;
using testing::kEpochs;
using testing::kStepsPerEpoch;
using testing::Words;

constexpr std::chrono::seconds kPatienceForRun{120};

struct Setting {
  std::string name;
  int ranks;
  Words options;
};

const std::vector<Setting> kSettings = {
    {"sgd", 2, {"--momentum", "0.9", "--nesterov"}},
    {"adamw", 2, {"--optimizer", "adamw", "--lr", "0.001", "--schedule", "cosine", "--warmup-epochs", "1"}},
    {"clipped", 3, {"--momentum", "0.9", "--clip-norm", "0.5"}},
    {"lamb", 2, {"--optimizer", "lamb", "--lr", "0.01", "--clip-norm", "1"}},
    {"lars_with_average", 2, {"--optimizer", "lars", "--ema-decay", "0.9"}},
    {"virtual_shards", 2, {"--virtual-shards", "4", "--momentum", "0.9"}},
    {"separate_parameters", 2, {"--separate-parameters", "--momentum", "0.9"}},
    {"two_bit", 2, {"--compression", "2bit", "--momentum", "0.9"}},
};

const std::vector<std::string> kPhases = {"meeting", "loading",    "forward", "backward", "publish",
                                          "update",  "validation", "saving",  "between"};

class RandomKills {
 public:
  explicit RandomKills(unsigned seed) : random_(seed) {}

  size_t below(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random_); }

  // A fault in this phase of a random step of a random rank.
  std::string fault_in(const std::string& phase, int ranks) {
    const size_t rank = phase == "saving" ? 0 : below(static_cast<size_t>(ranks));
    std::string fault = concat("rank=", rank, ",phase=", phase, moment(phase));
    if (phase == "meeting") return below(2) == 0 ? fault : second_fault(fault, ranks);
    const bool ends_epoch = phase == "validation" || phase == "saving";
    const size_t step = ends_epoch ? kStepsPerEpoch * (1 + below(kEpochs)) - 1 : below(kStepsPerEpoch * kEpochs);
    return concat(fault, ",step=", step);
  }

 private:
  // While the others wait to meet in the next generation.
  std::string second_fault(const std::string& fault, int ranks) {
    return concat(fault_in("between", ranks), ";", fault, ",generation=1");
  }

  std::string moment(const std::string& phase) {
    switch (below(phase == "update" ? 5 : 3)) {
      case 0: return ",at=start";
      case 1: return ",at=end";
      default: return concat(",after=", 1 + below(20000));
    }
  }

  std::mt19937 random_;
};

unsigned seed_of_this_run() {
  const char* const told = std::getenv("LOCKSTEP_KILLS_SEED");
  return told != nullptr ? static_cast<unsigned>(std::strtoul(told, nullptr, 10)) : std::random_device()();
}

testing::Outcome undisturbed(const Setting& setting) {
  const testing::TempFolder folder;
  const auto ended =
      testing::run(testing::command_of({.options = setting.options, .ranks = setting.ranks, .max_restarts = 0}, folder),
                   kPatienceForRun);
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  return testing::outcome_in(folder);
}

// Whether the fault has come.
bool expect_same_outcome(const Setting& setting, const std::string& faults, const testing::Outcome& expected) {
  SCOPED_TRACE(concat(setting.name, ": LOCKSTEP_FAULT=\"", faults, "\""));
  const testing::TempFolder folder;
  const Job job{.options = setting.options, .faults = faults, .ranks = setting.ranks, .max_restarts = 3};
  const auto ended = testing::run(testing::command_of(job, folder), kPatienceForRun);
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  if (ended.exit_code != 0) return false;
  EXPECT_EQ(testing::difference(expected, testing::outcome_in(folder)), "") << ended.error;
  const bool has_come =
      testing::contains(ended.error, "a new process takes its place") &&
      testing::count(ended.error, "lockstep: LOCKSTEP_FAULT: rank") == testing::count(faults, "phase=");
  if (!has_come) std::cout << "not every fault has come, or one more than once:\n" << ended.error << std::endl;
  return has_come;
}

TEST(Kills, at_random_points_leave_the_bits_of_an_undisturbed_run) {
  const unsigned seed = seed_of_this_run();
  const int phases = static_cast<int>(kPhases.size());
  const int kills = std::max(testing::rounds("LOCKSTEP_KILLS", 12), phases);
  std::cout << kills << " kills, LOCKSTEP_KILLS_SEED=" << seed << std::endl;
  RandomKills random(seed);
  std::map<std::string, testing::Outcome> expected;
  std::map<std::string, int> hits;
  for (int kill = 0; kill < kills; ++kill) {
    const Setting& setting = kSettings[random.below(kSettings.size())];
    const std::string& phase = kPhases[static_cast<size_t>(kill) % kPhases.size()];
    if (!expected.contains(setting.name)) expected[setting.name] = undisturbed(setting);
    const std::string faults = random.fault_in(phase, setting.ranks);
    const bool hit = expect_same_outcome(setting, faults, expected[setting.name]);
    EXPECT_TRUE(hit) << setting.name << ": " << faults;
    hits[phase] += hit ? 1 : 0;
  }
  for (const std::string& phase : kPhases) {
    std::cout << "  " << phase << ": " << hits[phase] << " hits" << std::endl;
    EXPECT_GE(hits[phase], kills / phases) << phase;
  }
}

// Devices that are threads die with their process. Where the state is kept by copy, steps since the copy are repeated.
class StrategyWithLosses : public ::testing::TestWithParam<Setting> {};

TEST_P(StrategyWithLosses, ends_with_the_bits_of_an_undisturbed_run) {
  const std::string faults = "step=8,phase=update;step=13,phase=between,generation=1";
  EXPECT_TRUE(expect_same_outcome(GetParam(), faults, undisturbed(GetParam())));
}

INSTANTIATE_TEST_SUITE_P(
    All, StrategyWithLosses,
    ::testing::Values(Setting{"single", 1, {"--strategy", "single", "--momentum", "0.9"}},
                      Setting{"float16", 1, {"--strategy", "single", "--precision", "float16", "--momentum", "0.9"}},
                      Setting{"towers", 2, {"--strategy", "towers", "--momentum", "0.9"}},
                      Setting{"data_parallel", 2, {"--strategy", "data_parallel", "--momentum", "0.9"}},
                      Setting{"averaging", 2, {"--strategy", "averaging", "--average-every", "2"}},
                      Setting{"kvstore_local", 2, {"--strategy", "kvstore", "--kvstore", "local"}},
                      Setting{
                          "kvstore_local_allreduce", 2, {"--strategy", "kvstore", "--kvstore", "local_allreduce_cpu"}},
                      Setting{"kvstore_dist_sync", 2, {"--strategy", "kvstore", "--kvstore", "dist_sync"}}),
    [](const auto& info) { return info.param.name; });

// Stages have about as many bytes each until they have been measured; a replacement begins there again.
TEST(Pipeline, whose_stages_were_measured_goes_on_after_a_loss) {
  const auto losses = [](const std::string& faults) {
    const testing::TempFolder folder;
    const Words command = {LOCKSTEP_COMMAND,
                           "train",
                           "--model",
                           "resnet18-32",
                           "--data",
                           "synthetic:64x3x32x32",
                           "--batch-size",
                           "8",
                           "--micro-batches",
                           "2",
                           "--max-steps",
                           "7",
                           "--threads",
                           "1",
                           "--strategy",
                           "pipeline",
                           "--devices-per-worker",
                           "1",
                           "--ranks",
                           "2",
                           "--max-restarts",
                           "2",
                           "--metrics",
                           folder.file("metrics.jsonl"),
                           "--quiet"};
    const auto ended = testing::run(testing::with_variables({{"LOCKSTEP_FAULT", faults}}, command), kPatienceForRun);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    EXPECT_EQ(testing::count(ended.error, "a new process takes its place"), faults.empty() ? 0 : 1);
    std::map<int, double> of_steps;
    for (const auto& line : testing::metrics_in(folder.file("metrics.jsonl")))
      if (line["event"] == "step") of_steps[line["step"]] = line["loss"];
    return of_steps;
  };
  const auto expected = losses(""), after_a_loss = losses("rank=1,step=4,phase=between");
  ASSERT_EQ(expected.size(), 7U);
  ASSERT_EQ(after_a_loss.size(), 7U);
  for (const auto& [step, loss] : expected) EXPECT_NEAR(after_a_loss.at(step), loss, 1e-4 * loss) << step;
}

}  // namespace
}  // namespace lockstep
