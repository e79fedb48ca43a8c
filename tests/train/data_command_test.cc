// SPDX-License-Identifier: Apache-2.0
// Starts `lockstep data`, and trains on what it wrote.
#include "tests/support.h"
#include "tests/train/lockstep_command.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Ended;
using testing::lines_of;
using testing::lockstep_command;
using testing::TempFolder;
using testing::Words;

Words train(const TempFolder& folder, const std::string& metrics, const Words& more) {
  Words words = {"train",
                 "--threads",
                 "1",
                 "--data",
                 "webdataset:" + folder.file("p"),
                 "--augment",
                 "crop:2,flip",
                 "--epochs",
                 "2",
                 "--batch-size",
                 "48",
                 "--quiet",
                 "--metrics",
                 folder.file(metrics)};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class ShardTraining : public ::testing::Test {
 protected:
  ShardTraining() {
    packed = lockstep_command(
        {"data", "pack", "--data", "synthetic:240x1x28x28?val=0.2", "--to", folder.file("p"), "--shard-mib", "0.05"});
  }
  TempFolder folder;
  Ended packed;
};

TEST_F(ShardTraining, describes_what_was_packed) {
  ASSERT_EQ(packed.exit_code, 0) << packed.error;
  const Ended info = lockstep_command({"data", "info", folder.file("p")});
  EXPECT_EQ(info.exit_code, 0);
  EXPECT_TRUE(contains(info.output, "samples      192"));
  EXPECT_TRUE(contains(info.output, "samples      48"));
  EXPECT_TRUE(contains(info.output, "(1, 28, 28)"));
}

TEST_F(ShardTraining, gives_the_same_losses_with_other_ranks_workers_and_after_a_resume) {
  ASSERT_EQ(lockstep_command(train(folder, "one", {"--workers", "0"})).exit_code, 0);
  const Words stop = {"--ranks", "2", "--workers", "2", "--checkpoint-dir", folder.file("c"), "--checkpoint-every",
                      "1"};
  Words first = stop;
  first.insert(first.end(), {"--max-steps", "3"});
  ASSERT_EQ(lockstep_command(train(folder, "two", first)).exit_code, 0);
  const Ended rest = lockstep_command(train(folder, "two", {"--checkpoint-dir", folder.file("c"), "--resume"}));
  ASSERT_EQ(rest.exit_code, 0) << rest.error;
  const auto one = lines_of(folder / "one", "step");
  const auto two = lines_of(folder / "two", "step");
  ASSERT_EQ(one.size(), 8U);
  ASSERT_EQ(two.size(), 8U);
  for (size_t i = 0; i < one.size(); ++i)
    EXPECT_NEAR(one[i].at("loss").get<double>(), two[i].at("loss").get<double>(), 1e-4) << i;
}

TEST_F(ShardTraining, reports_the_loading_in_the_metrics) {
  ASSERT_EQ(lockstep_command(train(folder, "m", {})).exit_code, 0);
  const nlohmann::json run = lines_of(folder / "m", "run").at(0);
  EXPECT_GT(run.at("data_read_seconds").get<double>(), 0);
  EXPECT_GT(run.at("data_assemble_seconds").get<double>(), 0);
  EXPECT_EQ(run.at("data_skipped").get<int>(), 0);
}

TEST_F(ShardTraining, skips_damaged_samples_if_told_to) {
  const auto shard = folder / "p/train/00000.tar";
  std::string bytes = read_file(shard);
  bytes[1800] ^= 1;  // of the first image
  write_file(shard, bytes);
  const Ended strict = lockstep_command(train(folder, "m", {}));
  EXPECT_EQ(strict.exit_code, 1);
  EXPECT_TRUE(contains(strict.error, "a sample's checksum does not match"));
  EXPECT_TRUE(contains(strict.error, "00000.tar"));
  EXPECT_EQ(lockstep_command(train(folder, "m", {"--skip-bad", "1"})).exit_code, 0);
  EXPECT_EQ(lines_of(folder / "m", "run").at(0).at("data_skipped").get<int>(), 2);  // once an epoch
}

using testing::TableTraining;

TEST_F(TableTraining, learns_named_classes_on_one_and_two_ranks_alike) {
  const Ended one = train_on("classes.csv", "one", {"--model", "mlp"});
  ASSERT_EQ(one.exit_code, 0) << one.error;
  ASSERT_EQ(train_on("classes.csv", "two", {"--model", "mlp", "--ranks", "2"}).exit_code, 0);
  const double accuracy = lines_of(folder / "one", "run").at(0).at("val_accuracy").get<double>();
  EXPECT_GT(accuracy, 0.8);
  const auto first = lines_of(folder / "one", "step"), second = lines_of(folder / "two", "step");
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < 30; ++i)
    EXPECT_NEAR(first[i].at("loss").get<double>(), second[i].at("loss").get<double>(), 1e-4) << i;
}

TEST_F(TableTraining, learns_numbers_with_each_strategy) {
  for (const char* strategy : {"single", "ddp", "towers", "data_parallel", "kvstore", "averaging", "pipeline"}) {
    const Words with_devices = {"--model", "mlp",     "--strategy",
                                strategy,  "--ranks", strategy == std::string("single") ? "1" : "2",
                                "--lr",    "0.01"};
    const Ended ended = train_on("numbers.csv", "m", with_devices);
    ASSERT_EQ(ended.exit_code, 0) << strategy << ended.error;
    const nlohmann::json epoch = lines_of(folder / "m", "epoch").back();
    EXPECT_LT(epoch.at("val_loss").get<double>(), 0.1) << strategy;
    EXPECT_TRUE(!epoch.contains("val_accuracy") || epoch.at("val_accuracy").is_null()) << strategy;
    std::filesystem::remove(folder / "m");
  }
}

TEST_F(TableTraining, names_the_models_that_take_a_table) {
  const Ended images = train_on("classes.csv", "m", {});
  EXPECT_EQ(images.exit_code, 2);
  EXPECT_TRUE(contains(images.error, "lenet takes images")) << images.error;
  EXPECT_TRUE(contains(images.error, "mlp takes numbers of any shape"));
  const Ended few = train_on("classes.csv", "m", {"--model", "mlp", "--classes", "2"});
  EXPECT_EQ(few.exit_code, 1);
  EXPECT_TRUE(contains(few.error, "is not one of the model's 2 classes")) << few.error;
}

TEST(DataCommand, refuses_unknown_data_and_folders) {
  EXPECT_EQ(lockstep_command({"data", "pack", "--data", "nothing", "--to", "/tmp/x"}).exit_code, 2);
  EXPECT_EQ(lockstep_command({"data"}).exit_code, 2);
  const Ended info = lockstep_command({"data", "info", "/no/such/folder"});
  EXPECT_EQ(info.exit_code, 1);
  EXPECT_TRUE(contains(info.error, "can't read /no/such/folder"));
}

}  // namespace
}  // namespace lockstep
