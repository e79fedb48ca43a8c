// SPDX-License-Identifier: Apache-2.0
// A loop of one's own with lockstep::Recovery whose ranks are killed: it ends with the bits of a loop that nobody disturbed,
// and no sample is lost or seen twice.
#include <gtest/gtest.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "lockstep/base/text.h"
#include "tests/launch/child.h"
#include "tests/support.h"
#include "tests/train/command.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Ended;
using testing::run;
using testing::TempFolder;
using testing::with_variables;
using testing::operator+;
using testing::Words;
using Variables = std::map<std::string, std::string>;

constexpr std::chrono::seconds kLongLoop{120};

Ended run_surviving(int ranks, const Variables& variables, int restarts = 3, const Words& more = {}) {
  const Words launcher = {LOCKSTEP_COMMAND,        "run", "--nproc-per-node", std::to_string(ranks), "--max-restarts",
                          std::to_string(restarts)};
  return run(with_variables(variables, launcher + more + Words{"--", SURVIVING_LOOP}), kLongLoop);
}

// Of rank 0: "trained 26 steps, HASH, SUM, SCALE".
std::string result_of(const Ended& ended) {
  const size_t begin = ended.output.find("trained ");
  return begin == std::string::npos ? "" : ended.output.substr(begin, ended.output.find('\n', begin) - begin);
}

const std::string& undisturbed(const std::string& optimizer) {
  static std::map<std::string, std::string> results;
  if (results[optimizer].empty()) results[optimizer] = result_of(run_surviving(2, {{"OPTIMIZER", optimizer}}));
  return results[optimizer];
}

class SurvivingLoop : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};
INSTANTIATE_TEST_SUITE_P(Kills, SurvivingLoop,
                         ::testing::Values(std::pair("sgd", "0:1:5:forward"), std::pair("sgd", "0:0:5:forward"),
                                           std::pair("adamw", "0:1:7:update"), std::pair("torch_adam", "0:0:7:update"),
                                           std::pair("sgd", "0:1:6:keep"), std::pair("adamw", "0:0:6:keep"),
                                           std::pair("sgd", "0:1:8:between"), std::pair("sgd", "0:1:13:epoch"),
                                           std::pair("sgd", "0:0:26:epoch"), std::pair("sgd", "0:1:0:made"),
                                           std::pair("sgd", "0:1:0:forward"),
                                           std::pair("sgd", "0:0:3:forward,0:1:3:forward"),
                                           std::pair("adamw", "0:1:3:forward,1:0:3:forward,2:1:20:update"),
                                           std::pair("sgd", "0:1:9:forward,1:1:0:made,2:0:0:begin"),
                                           std::pair("scaled", "0:1:7:update,1:0:17:keep")),
                         [](const auto& test) {
                           std::string name = concat(test.param.first, "_", test.param.second);
                           for (char& c : name)
                             if (c == ':' || c == ',') c = '_';
                           return name;
                         });

TEST_P(SurvivingLoop, has_the_bits_of_an_undisturbed_one) {
  const auto [optimizer, kill] = GetParam();
  const Ended ended = run_surviving(2, {{"OPTIMIZER", optimizer}, {"KILL", kill}});
  ASSERT_EQ(ended.exit_code, 0) << ended.output << ended.error;
  EXPECT_FALSE(undisturbed(optimizer).empty());
  EXPECT_EQ(result_of(ended), undisturbed(optimizer)) << ended.error;
}

TEST(SurvivingLoop, has_the_bits_wherever_a_rank_dies) {
  std::minstd_rand random(static_cast<unsigned>(std::time(nullptr)));
  for (int round = 0; round < testing::rounds("LOCKSTEP_FAULT_ROUNDS", 6); ++round) {
    const std::string after = std::to_string(1 + random() % 3000);
    const std::string kill = concat("0:", random() % 2, ":", random() % 26, ":timer");
    const Ended ended = run_surviving(2, {{"OPTIMIZER", "adamw"}, {"KILL", kill}, {"AFTER", after}});
    ASSERT_EQ(ended.exit_code, 0) << kill << " after " << after << ended.output << ended.error;
    EXPECT_EQ(result_of(ended), undisturbed("adamw")) << kill << " after " << after << ended.error;
  }
}

// The samples of all ranks in each step, as (epoch, step): what the generation recorded that made it last.
using Batches = std::map<std::pair<int, int>, std::multiset<int>>;

Batches batches_in(const std::string& folder) {
  std::map<std::pair<int, int>, std::map<int, std::multiset<int>>> made;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    std::ifstream lines(file.path());
    for (std::string line; std::getline(lines, line);) {
      std::istringstream numbers(line);
      int generation = 0, epoch = 0, step = 0;
      numbers >> generation >> epoch >> step;
      auto& ids = made[{epoch, step}][generation];
      for (int id = 0; numbers >> id;) ids.insert(id);
    }
  }
  Batches batches;
  for (const auto& [place, generations] : made) batches[place] = generations.rbegin()->second;
  return batches;
}

void expect_every_sample_once(const Batches& batches) {
  std::map<int, std::multiset<int>> epochs;
  for (const auto& [place, ids] : batches) epochs[place.first].insert(ids.begin(), ids.end());
  ASSERT_EQ(epochs.size(), 2U);
  for (const auto& [epoch, ids] : epochs) {
    EXPECT_EQ(ids.size(), 203U) << "epoch " << epoch;
    EXPECT_EQ(std::set<int>(ids.begin(), ids.end()).size(), 203U) << "epoch " << epoch;
    EXPECT_EQ(*ids.rbegin(), 202);
  }
}

TEST(SurvivingLoop, sees_every_sample_once_in_each_epoch) {
  const TempFolder folder;
  const Ended ended =
      run_surviving(3, {{"IDS", folder.path()}, {"KILL", "0:1:4:forward,1:0:12:update,2:2:13:epoch,3:1:20:keep"}}, 4);
  ASSERT_EQ(ended.exit_code, 0) << ended.error;
  expect_every_sample_once(batches_in(folder.path()));
}

TEST(SurvivingLoop, with_fewer_ranks_has_the_same_global_batches) {
  const TempFolder folder, undisturbed_folder;
  const Ended fewer =
      run_surviving(3, {{"IDS", folder.path()}, {"KILL", "0:1:4:forward,1:1:17:update"}}, 0, {"--min-ranks", "1"});
  ASSERT_EQ(fewer.exit_code, 0) << fewer.error;
  ASSERT_EQ(run_surviving(3, {{"IDS", undisturbed_folder.path()}}).exit_code, 0);
  expect_every_sample_once(batches_in(folder.path()));
  EXPECT_EQ(batches_in(folder.path()), batches_in(undisturbed_folder.path()));
}

TEST(SurvivingLoop, that_starts_over_after_a_loss_is_an_error) {
  const Ended ended = run_surviving(2, {{"FORGETS", "epoch"}, {"KILL", "0:1:5:forward"}}, 1);
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.error, "the training has been at sample"));
}

TEST(SurvivingLoop, that_would_lose_its_gradient_scaler_is_an_error_before_a_loss) {
  const Ended ended = run_surviving(2, {{"OPTIMIZER", "scaled"}, {"FORGETS", "scaler"}}, 1);
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.error, "GradientScaler that Recovery was not given")) << ended.error;
}

TEST(SurvivingLoop, without_a_launcher_that_replaces_ranks_is_a_loop) {
  const Ended ended = run({SURVIVING_LOOP}, kLongLoop);
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_FALSE(result_of(ended).empty());
}

}  // namespace
}  // namespace lockstep
