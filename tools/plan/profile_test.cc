// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/profile.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <limits>

#include "lockstep/base/files/file.h"
#include "lockstep/error.h"
#include "lockstep/models.h"
#include "tests/support.h"
#include "tools/plan/measure.h"

namespace lockstep::plan {
namespace {

Profile some_profile() {
  Profile profile{.model = "model", .machine = "machine", .cores = 2};
  profile.curves = {{.points = {{.samples = 2, .forward = 2, .backward = 4, .update = 1},
                                {.samples = 4, .forward = 3, .backward = 6, .update = 3},
                                {.samples = 8, .forward = 5, .backward = 10, .update = 2}}}};
  profile.copy_speed = 1e9;
  profile.pieces = {{.name = "piece", .seconds = 1, .bytes = 2, .output_bytes = 3}};
  return profile;
}

class ProfileFile : public ::testing::Test {
 protected:
  const testing::TempFolder folder_;
  const std::filesystem::path file_ = folder_ / "profile.json";
};

TEST_F(ProfileFile, IsReadAsItWasWritten) {
  save_profile(file_, some_profile());
  const Profile read = load_profile(file_);
  EXPECT_EQ(read.model, "model");
  EXPECT_EQ(read.copy_speed, some_profile().copy_speed);
  ASSERT_EQ(read.curves.size(), 1U);
  EXPECT_EQ(read.curves[0].points[2].backward, 10);
  EXPECT_EQ(read.pieces[0].output_bytes, 3);
}

TEST_F(ProfileFile, WithoutTheCopySpeedOfAllCoresIsRead) {
  std::string text = text_of(some_profile());
  const std::string part = R"("copy_speed_of_all": 0.0,)";
  ASSERT_TRUE(testing::contains(text, part));
  write_file(file_, text.erase(text.find(part), part.size()));
  EXPECT_EQ(load_profile(file_).copy_speed_of_all, 0);
}

TEST_F(ProfileFile, ThatIsDamagedIsAnError) {
  for (const char* text : {"", "{", "[]", "{}", R"({"format": 99})", R"({"format": 1, "model": "m"})"}) {
    write_file(file_, text);
    EXPECT_THROW(load_profile(file_), DataError) << text;
  }
  EXPECT_THROW(load_profile(folder_ / "missing.json"), SystemError);
}

// Each would let something take no time, or for ever.
TEST_F(ProfileFile, WithANumberThatCannotBeIsAnError) {
  const double never = std::numeric_limits<double>::infinity();
  const auto refuses = [&](const char* what, const std::function<void(Profile&)>& change) {
    Profile profile = some_profile();
    change(profile);
    EXPECT_THROW(save_profile(file_, profile), DataError) << what;
    write_file(file_, text_of(profile));
    EXPECT_THROW(load_profile(file_), DataError) << what;
  };
  refuses("no curves", [](Profile& p) { p.curves.clear(); });
  refuses("no points", [](Profile& p) { p.curves.front().points.clear(); });
  refuses("no samples", [](Profile& p) { p.curves.front().points.front().samples = 0; });
  refuses("equal samples", [](Profile& p) { p.curves.front().points[1].samples = 2; });
  refuses("no time", [](Profile& p) { p.curves.front().points[1].forward = p.curves.front().points[1].backward = 0; });
  refuses("a negative time", [](Profile& p) { p.curves.front().points[1].update = -1; });
  refuses("no cores", [](Profile& p) { p.cores = 0; });
  refuses("more cores than there are", [](Profile& p) { p.cores = 2'000'000'000; });
  refuses("pieces without time", [](Profile& p) { p.pieces.front().seconds = 0; });
  refuses("memory that is not read", [](Profile& p) { p.copy_speed = 0; });
  refuses("a spread that is not sorted", [](Profile& p) { p.spread = {1.1, 0.9}; });
  refuses("memory without end", [&](Profile& p) { p.connection_bytes = never; });
  refuses("a negative number", [](Profile& p) { p.tensors = {-1}; });
  refuses("a rank without memory", [&](Profile& p) { p.memory_of_rank = {{.samples = 1}}; });
  refuses("no curve of a rank alone", [](Profile& p) { p.curves.front().at_once = 2; });
}

TEST_F(ProfileFile, OfDeviceThreadsThatTakeNoTimeIsFine) {
  Profile profile = some_profile();
  profile.curves.push_back({.at_once = 2, .in_one_process = true, .points = {{.samples = 1}}});
  EXPECT_NO_THROW(save_profile(file_, profile));
}

TEST(Profile, HasStraightLinesBetweenWhatWasMeasured) {
  const Curve curve = some_profile().curves.front();
  EXPECT_DOUBLE_EQ(times_for(curve, 4).forward, 3);
  EXPECT_DOUBLE_EQ(times_for(curve, 6).forward, 4);
  EXPECT_DOUBLE_EQ(times_for(curve, 3).backward, 5);
  EXPECT_DOUBLE_EQ(times_for(curve, 16).forward, 9);  // the last line goes on
  EXPECT_DOUBLE_EQ(times_for(curve, 0).forward, 0);
  EXPECT_DOUBLE_EQ(times_for(curve, 4).update, 2);  // the median
}

TEST(Profile, FindsFixedAndGrowingCosts) {
  const Line line = line_through({{.bytes = 0, .seconds = 2}, {.bytes = 100, .seconds = 12}});
  EXPECT_NEAR(line.fixed, 2, 1e-9);
  EXPECT_NEAR(line.per_byte, 0.1, 1e-9);
}

TEST(Profile, OfAnotherModelOrMachineIsRefused) {
  const Task task = model_task("lenet");
  const StrategyOptions strategy{.optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9}};
  Profile profile = some_profile();
  profile.model = model_text(task, strategy);
  profile.machine = machine_text();
  const Subject subject{.task = task, .strategy = strategy, .data_text = "digits"};
  profile.data = "digits";
  EXPECT_NO_THROW(require_profile_of(profile, subject, /*any_machine=*/false));
  Subject other = subject;
  other.task = model_task("mlp");
  EXPECT_THROW(require_profile_of(profile, other, false), UsageError);
  other = subject;
  other.strategy.optimizer = AdamOptions{};
  EXPECT_THROW(require_profile_of(profile, other, false), UsageError);
  other = subject;
  other.strategy.layout = Layout::kChannelsLast;
  EXPECT_THROW(require_profile_of(profile, other, false), UsageError);
  other = subject;
  other.data_text = "photographs";
  EXPECT_THROW(require_profile_of(profile, other, false), UsageError);
  profile.machine = "another";
  EXPECT_THROW(require_profile_of(profile, subject, false), UsageError);
  EXPECT_NO_THROW(require_profile_of(profile, subject, true));
}

}  // namespace
}  // namespace lockstep::plan
