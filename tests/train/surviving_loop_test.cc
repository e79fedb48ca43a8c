// SPDX-License-Identifier: Apache-2.0
// A loop of one's own with lockstep::Recovery whose ranks are killed: it ends with the bits of a loop that nobody disturbed,
// and no sample is lost or seen twice.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
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
using testing::Words;
using Variables = std::map<std::string, std::string>;

constexpr std::chrono::seconds kLongLoop{120};

Ended run_surviving(int ranks, const Variables& variables, int restarts = 3) {
  return run(with_variables(variables, {LOCKSTEP_COMMAND, "run", "--nproc-per-node", std::to_string(ranks), "--max-restarts",
                                        std::to_string(restarts), "--", SURVIVING_LOOP}),
             kLongLoop);
}

// Of rank 0: "trained 26 steps, HASH, SUM".
std::string result_of(const Ended& ended) {
  const std::size_t begin = ended.output.find("trained ");
  return begin == std::string::npos ? "" : ended.output.substr(begin, ended.output.find('\n', begin) - begin);
}

const std::string& undisturbed(const std::string& optimizer) {
  static std::map<std::string, std::string> results;
  if (results[optimizer].empty()) results[optimizer] = result_of(run_surviving(2, {{"OPTIMIZER", optimizer}}));
  return results[optimizer];
}

class SurvivingLoop : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};
INSTANTIATE_TEST_SUITE_P(
    Kills, SurvivingLoop,
    ::testing::Values(std::pair("sgd", "0:1:5:forward"), std::pair("sgd", "0:0:5:forward"),
                      std::pair("adamw", "0:1:7:update"), std::pair("torch_adam", "0:0:7:update"),
                      std::pair("sgd", "0:1:6:keep"), std::pair("adamw", "0:0:6:keep"), std::pair("sgd", "0:1:8:between"),
                      std::pair("sgd", "0:1:13:epoch"), std::pair("sgd", "0:0:26:epoch"),
                      std::pair("sgd", "0:1:0:made"), std::pair("sgd", "0:1:0:forward"),
                      std::pair("sgd", "0:0:3:forward,0:1:3:forward"),
                      std::pair("adamw", "0:1:3:forward,1:0:3:forward,2:1:20:update"),
                      std::pair("sgd", "0:1:9:forward,1:1:0:made,2:0:0:begin")),
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

// What was recorded of each step by the generation that made it last.
std::map<int, std::multiset<int>> ids_by_epoch(const std::string& folder) {
  std::map<std::pair<int, int>, std::map<int, std::multiset<int>>> made;  // (epoch, step) -> generation -> samples
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
  std::map<int, std::multiset<int>> epochs;
  for (const auto& [place, generations] : made)
    epochs[place.first].insert(generations.rbegin()->second.begin(), generations.rbegin()->second.end());
  return epochs;
}

TEST(SurvivingLoop, sees_every_sample_once_in_each_epoch) {
  const TempFolder folder;
  const Ended ended =
      run_surviving(3, {{"IDS", folder.path()}, {"KILL", "0:1:4:forward,1:0:12:update,2:2:13:epoch,3:1:20:keep"}}, 4);
  ASSERT_EQ(ended.exit_code, 0) << ended.error;
  const auto epochs = ids_by_epoch(folder.path());
  ASSERT_EQ(epochs.size(), 2U);
  for (const auto& [epoch, ids] : epochs) {
    EXPECT_EQ(ids.size(), 203U) << "epoch " << epoch;
    EXPECT_EQ(std::set<int>(ids.begin(), ids.end()).size(), 203U) << "epoch " << epoch;
    EXPECT_EQ(*ids.rbegin(), 202);
  }
}

TEST(SurvivingLoop, that_begins_anew_after_a_loss_is_an_error) {
  const Ended ended = run_surviving(2, {{"FORGETS", "1"}, {"KILL", "0:1:5:forward"}}, 1);
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.error, "the training has been at sample"));
}

TEST(SurvivingLoop, without_a_launcher_that_replaces_ranks_is_a_loop) {
  const Ended ended = run({SURVIVING_LOOP}, kLongLoop);
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_FALSE(result_of(ended).empty());
}

}  // namespace
}  // namespace lockstep
