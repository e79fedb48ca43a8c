// SPDX-License-Identifier: Apache-2.0
// Starts `lockstep plan`, and `lockstep train --strategy auto`.
#include <signal.h>

#include "lockstep/base/files/file.h"
#include "tests/launch/child.h"
#include "tests/support.h"
#include "tests/train/command.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Ended;
using testing::TempFolder;
using testing::Words;
using testing::operator+;

constexpr std::chrono::seconds kMeasures{120};

Ended plan_lenet(const Words& words) {
  return testing::run(
      Words{LOCKSTEP_COMMAND, "plan", "--model", "lenet", "--data", "synthetic", "--batch-size", "8"} + words,
      kMeasures);
}

TEST(PlanCommand, MakesAProfileOnceAndForecastsFromIt) {
  const TempFolder folder;
  const Words profile{"--profile", folder.file("profile.json")};
  const Ended first = plan_lenet(profile + Words{"--devices", "2"});
  ASSERT_EQ(first.exit_code, 0) << first.error;
  for (const char* name : {"ddp", "single", "towers", "data_parallel", "kvstore local", "kvstore dist_sync, 1 server",
                           "kvstore dist_async, 1 server", "averaging, h = 8", "pipeline 1f1b, 2 x 4"})
    EXPECT_TRUE(contains(first.output, concat("\n", name, "  "))) << name << " not in\n" << first.output;
  EXPECT_TRUE(contains(first.output, "\nlockstep train … --strategy "));

  const Ended machines =
      plan_lenet(profile + Words{"--machines", "4", "--link-mbit", "100", "--trace", folder.file("t.json")});
  ASSERT_EQ(machines.exit_code, 0) << machines.error;
  EXPECT_FALSE(machines.error.find("measuring") != std::string::npos) << machines.error;
  EXPECT_TRUE(contains(machines.output, "link MB/step"));
  EXPECT_TRUE(contains(read_file(folder.file("t.json")), "forecast: network of machine 3"));

  const Ended text = plan_lenet(profile + Words{"--devices", "2", "--epochs", "3"});
  ASSERT_EQ(text.exit_code, 0) << text.error;
  EXPECT_TRUE(contains(text.output, "time of 3 epochs")) << text.output;

  const Ended scaling = plan_lenet(profile + Words{"--scaling", "4,8", "--memory-bandwidth", "20"});
  ASSERT_EQ(scaling.exit_code, 0) << scaling.error;
  for (const char* part : {"Forecast, not measured", "at most 20.0", "1 x 4", "8 x 1", "data_parallel"})
    EXPECT_TRUE(contains(scaling.output, part)) << part << " not in\n" << scaling.output;

  const Ended other = testing::run({LOCKSTEP_COMMAND, "plan", "--model", "mlp", "--data", "synthetic", "--batch-size",
                                    "8", "--profile", folder.file("profile.json")});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_TRUE(contains(other.error, "the profile is of another model"));
  const Ended data = testing::run({LOCKSTEP_COMMAND, "plan", "--model", "lenet", "--data", "synthetic:64x1x28x28",
                                   "--batch-size", "8", "--profile", folder.file("profile.json")});
  EXPECT_EQ(data.exit_code, 2);
  EXPECT_TRUE(contains(data.error, "the profile was made with other data"));
  const Ended crowd = plan_lenet(profile + Words{"--devices", "9"});
  EXPECT_EQ(crowd.exit_code, 2);
  EXPECT_TRUE(contains(crowd.error, "a target that can't be: a batch of 8 for 9 devices"));
}

TEST(PlanCommand, SaysWhatIsWrongBeforeItMeasures) {
  const TempFolder folder;
  write_file(folder.file("broken.json"), "{");
  const Ended broken = plan_lenet({"--profile", folder.file("broken.json")});
  EXPECT_EQ(broken.exit_code, 1);
  EXPECT_TRUE(contains(broken.error, "is damaged, or not a profile"));
  EXPECT_EQ(plan_lenet({"--machines", "0"}).exit_code, 2);
  EXPECT_EQ(plan_lenet({"--link-mbit", "0", "--machines", "2"}).exit_code, 2);
  EXPECT_TRUE(contains(plan_lenet({"--link-mbit", "nan", "--machines", "2"}).error, "not a finite number"));
  EXPECT_EQ(plan_lenet({"--trace", folder.file("t.txt")}).exit_code, 2);
  EXPECT_EQ(plan_lenet({"--of", "ddp"}).exit_code, 2);
  EXPECT_NE(plan_lenet({"--scaling", "0"}).exit_code, 0);
  EXPECT_NE(plan_lenet({"--scaling", "16", "--devices", "2"}).exit_code, 0);
  EXPECT_NE(plan_lenet({"--memory-bandwidth", "20"}).exit_code, 0);
  EXPECT_EQ(plan_lenet({"--accumulate", "2"}).exit_code, 2);
  EXPECT_TRUE(contains(plan_lenet({"--precision", "float16"}).error, "lockstep plan with --precision float16"));
  const Ended nowhere = plan_lenet({"--profile", folder.file("missing/profile.json")});
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_FALSE(contains(nowhere.error, "measuring")) << nowhere.error;
  const Ended small = testing::run({LOCKSTEP_COMMAND, "train", "--model", "lenet", "--data", "synthetic",
                                    "--batch-size", "2", "--strategy", "auto", "--ranks", "4"});
  EXPECT_EQ(small.exit_code, 2);
  EXPECT_FALSE(contains(small.error, "measures")) << small.error;
}

TEST(PlanCommand, TrainingTakesTheChoiceAndSaysWhy) {
  const TempFolder folder;
  const Ended ended =
      testing::run({LOCKSTEP_COMMAND, "train", "--model", "lenet", "--data", "synthetic", "--batch-size", "8",
                    "--strategy", "auto", "--ranks", "2", "--max-steps", "3", "--metrics", folder.file("metrics")},
                   kMeasures);
  ASSERT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_TRUE(contains(ended.error, "--strategy auto is "));
  EXPECT_TRUE(contains(ended.error, "a step"));
  EXPECT_EQ(testing::steps_in(folder.file("metrics")), 3U);
}

TEST(PlanCommand, TrainingThatIsAskedToStopWhileItMeasuresEndsAsItWasTold) {
  testing::Child job({LOCKSTEP_COMMAND, "train", "--model", "lenet", "--data", "synthetic", "--batch-size", "8",
                      "--strategy", "auto", "--ranks", "2", "--on-stop", "99"});
  ASSERT_TRUE(testing::wait_until([&] { return contains(job.error(), "measures"); }));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(kMeasures), 99) << job.error();
}

TEST(PlanCommand, TrainingOnOneDeviceNeedsNoForecast) {
  const Ended ended = testing::run({LOCKSTEP_COMMAND, "train", "--model", "lenet", "--data", "synthetic",
                                    "--batch-size", "8", "--strategy", "auto", "--max-steps", "1"});
  ASSERT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_TRUE(contains(ended.error, "--strategy auto is single: there is one device"));
}

TEST(PlanCommand, TrainingWithAnOptionOfDdpNamesIt) {
  const Ended ended =
      testing::run({LOCKSTEP_COMMAND, "train", "--model", "lenet", "--data", "synthetic", "--batch-size", "8",
                    "--strategy", "auto", "--ranks", "2", "--max-steps", "1", "--virtual-shards", "2"});
  ASSERT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_TRUE(contains(ended.error, "--strategy auto is ddp: not every other strategy has --virtual-shards"));
}

}  // namespace
}  // namespace lockstep
