// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/profile.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "lockstep/base/file.h"
#include "lockstep/error.h"
#include "lockstep/models.h"
#include "lockstep/plan/measure.h"
#include "tests/support.h"

namespace lockstep::plan {
namespace {

Profile some_profile() {
  Profile profile{.model = "model", .machine = "machine", .cores = 2};
  profile.curves = {{.points = {{.samples = 2, .forward = 2, .backward = 4, .update = 1},
                                {.samples = 4, .forward = 3, .backward = 6, .update = 3},
                                {.samples = 8, .forward = 5, .backward = 10, .update = 2}}}};
  profile.copy_speed = {1e9, 1.5e9};
  profile.pieces = {{.name = "piece", .seconds = 1, .bytes = 2, .output_bytes = 3}};
  profile.compression = {{.kind = "2bit", .sent = 0.0625, .encode = 1e-9, .decode = 2e-9}};
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
  EXPECT_EQ(compression_for(read, "2bit").decode, 2e-9);
  EXPECT_THROW(compression_for(read, "topk"), UsageError);
}

TEST_F(ProfileFile, ThatIsDamagedIsAnError) {
  for (const char* text : {"", "{", "[]", "{}", R"({"format": 99})", R"({"format": 1, "model": "m"})"}) {
    write_file(file_, text);
    EXPECT_THROW(load_profile(file_), DataError) << text;
  }
  Profile empty = some_profile();
  empty.curves.clear();
  save_profile(file_, empty);
  EXPECT_THROW(load_profile(file_), DataError);
  EXPECT_THROW(load_profile(folder_ / "missing.json"), SystemError);
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
  EXPECT_NO_THROW(require_profile_of(profile, task, strategy, /*any_machine=*/false));
  EXPECT_THROW(require_profile_of(profile, model_task("mlp"), strategy, false), UsageError);
  EXPECT_THROW(require_profile_of(profile, task, {.optimizer = AdamOptions{}}, false), UsageError);
  profile.machine = "another";
  EXPECT_THROW(require_profile_of(profile, task, strategy, false), UsageError);
  EXPECT_NO_THROW(require_profile_of(profile, task, strategy, true));
}

}  // namespace
}  // namespace lockstep::plan
