// SPDX-License-Identifier: Apache-2.0
// `lockstep eval` and `lockstep predict`, and what training keeps for them.
#include <cstring>
#include <set>

#include "tests/train/lockstep_command.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Ended;
using testing::lines_of;
using testing::lockstep_command;
using testing::Words;

class TrainedTable : public testing::TableTraining {
 protected:
  Ended train_mlp(const Words& more = {}, const std::string& table = "classes.csv") {
    return train_on(table, "m", Words{"--model", "mlp", "--checkpoint-dir", folder.file("run")} + more);
  }
  Ended use(const char* how, const Words& more = {}) {
    return lockstep_command(Words{how, "--checkpoint-dir", folder.file("run"), "--threads", "1"} + more);
  }
  std::vector<std::string> lines(const std::string& file) {
    std::vector<std::string> all = split(read_file(folder / file), '\n');
    all.pop_back();
    return all;
  }
  nlohmann::json evaluation(const Words& more = {}) {
    std::filesystem::remove(folder / "e");
    const Ended ended = use("eval", Words{"--metrics", folder.file("e")} + more);
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    printed = ended.output;
    return lines_of(folder / "e", "eval").at(0);
  }
  std::set<std::string> checkpoints() {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "run"))
      if (entry.path().extension() == ".safetensors") names.insert(entry.path().stem());
    return names;
  }
  std::string printed;
};

TEST_F(TrainedTable, is_evaluated_as_in_training_by_any_number_of_ranks) {
  ASSERT_EQ(train_mlp().exit_code, 0);
  const nlohmann::json last = lines_of(folder / "m", "epoch").back();
  const nlohmann::json one = evaluation();
  EXPECT_EQ(one.at("samples"), 60);
  EXPECT_NEAR(one.at("loss").get<double>(), last.at("val_loss").get<double>(), 1e-6);
  EXPECT_EQ(one.at("accuracy"), last.at("val_accuracy"));
  EXPECT_EQ(one.at("confusion_matrix"), last.at("val_confusion_matrix"));
  EXPECT_EQ(one.at("classes"), (Words{"high", "low", "middle"}));
  double right = 0, all = 0;
  for (size_t i = 0; i < 3; ++i)
    for (size_t j = 0; j < 3; ++j) {
      const double count = one.at("confusion_matrix")[i][j];
      all += count;
      right += i == j ? count : 0;
    }
  EXPECT_EQ(all, 60);
  EXPECT_DOUBLE_EQ(right / all, one.at("accuracy").get<double>());
  EXPECT_TRUE(contains(printed, "mlp after step 180 on classes.csv: 60 samples")) << printed;
  EXPECT_TRUE(contains(printed, "middle")) << printed;
  for (const char* ranks : {"2", "3", "7"}) {
    const nlohmann::json more = evaluation({"--ranks", ranks, "--batch-size", "16"});
    EXPECT_EQ(more.at("confusion_matrix"), one.at("confusion_matrix")) << ranks;
    EXPECT_NEAR(more.at("loss").get<double>(), one.at("loss").get<double>(), 1e-6) << ranks;
  }
}

TEST_F(TrainedTable, predicts_rows_without_a_target_in_their_order) {
  ASSERT_EQ(train_mlp().exit_code, 0);
  std::string rows = "x,y\n";
  std::vector<std::string> wanted;
  for (int i = 0; i < 50; ++i) {
    const int x = i * 11 % 100, y = i * 17 % 100;
    rows += concat(x, ",", 1000 + y, "\n");
    wanted.push_back(x + y < 70 ? "low" : x + y < 130 ? "middle" : "high");
  }
  write_file(folder / "new.csv", rows);
  const Words data = {"--data", "csv:" + folder.file("new.csv"), "--output"};
  for (const char* ranks : {"1", "3"}) {
    const std::string file = concat("p", ranks, ".csv");
    const Ended ended = use("predict", data + Words{folder.file(file), "--ranks", ranks, "--batch-size", "7"});
    ASSERT_EQ(ended.exit_code, 0) << ended.error;
    ASSERT_EQ(lines(file).size(), 51U);
    EXPECT_EQ(lines(file)[0], "sample,class,probability");
    int right = 0;
    for (size_t i = 0; i < 50; ++i) {
      const auto fields = split(lines(file)[i + 1], ',');
      EXPECT_EQ(fields.at(0), concat(i));
      EXPECT_GT(std::stod(fields.at(2)), 1 / 3.0 - 1e-6);
      right += fields.at(1) == wanted[i] ? 1 : 0;
    }
    EXPECT_GT(right, 38) << ranks;
  }
  ASSERT_EQ(use("predict", data + Words{folder.file("p.npy"), "--ranks", "2"}).exit_code, 0);
  const std::string array = read_file(folder / "p.npy");
  EXPECT_TRUE(contains(array.substr(0, 128), "'descr': '<f4', 'fortran_order': False, 'shape': (50, 3, )"));
  ASSERT_EQ(array.size() % 64, 50 * 3 * 4 % 64);
  std::vector<float> logits(150);
  std::memcpy(logits.data(), array.data() + array.size() - 600, 600);
  const std::vector<std::string> names = {"high", "low", "middle"};
  for (size_t i = 0; i < 50; ++i) {
    const auto row = std::span(logits).subspan(i * 3, 3);
    EXPECT_EQ(names[static_cast<size_t>(std::ranges::max_element(row) - row.begin())],
              split(lines("p1.csv")[i + 1], ',').at(1));
  }
}

TEST_F(TrainedTable, has_the_classes_and_columns_of_the_training_in_other_data) {
  ASSERT_EQ(train_mlp().exit_code, 0);
  const auto on = [&](const std::string& text) {
    write_file(folder / "other.csv", text);
    return Words{"--data", "csv:" + folder.file("other.csv")};
  };
  const nlohmann::json one_class = evaluation(on("x,y,kind\n10,1010,low\n5,1008,low\n"));
  EXPECT_EQ(one_class.at("samples"), 2);
  EXPECT_EQ(one_class.at("accuracy"), 1);  // "low" is class 1, as in training
  EXPECT_EQ(one_class.at("confusion_matrix")[1][1], 2);
  EXPECT_TRUE(
      contains(use("eval", on("x,y,kind\n1,1,tiny\n")).error, "'tiny' is not one of the classes high, low, middle"));
  EXPECT_TRUE(contains(use("eval", on("y,x,kind\n1,1,low\n")).error, "in training they were x, y (2)"));
  EXPECT_TRUE(contains(use("eval", on("x,y,z,kind\n1,1,1,low\n")).error, "in training they were x, y (2)"));
  EXPECT_TRUE(contains(use("eval", on("x,y\n1,1\n")).error, "the samples have no targets to compare with"));
  EXPECT_TRUE(contains(use("eval", {"--data", "synthetic:8x1x28x28"}).error, "for a model of [2]"));
  write_file(folder / "classes.csv", read_file(folder / "classes.csv") + "1,1001,low\n");
  EXPECT_TRUE(contains(use("eval").error, "has changed since the training"));
}

TEST_F(TrainedTable, measures_numbers) {
  ASSERT_EQ(train_mlp({"--lr", "0.01"}, "numbers.csv").exit_code, 0);
  const nlohmann::json one = evaluation(), two = evaluation({"--ranks", "2"});
  EXPECT_GT(one.at("r_squared").get<double>(), 0.9);
  EXPECT_LT(one.at("mean_absolute_error").get<double>(), 0.3);
  EXPECT_NEAR(one.at("r_squared").get<double>(), two.at("r_squared").get<double>(), 1e-6);
  ASSERT_EQ(use("predict", {"--output", folder.file("p.csv")}).exit_code, 0);
  EXPECT_EQ(lines("p.csv")[0], "sample,output0");
  EXPECT_EQ(lines("p.csv").size(), 301U);  // all rows, in the table's order
  EXPECT_NEAR(std::stod(split(lines("p.csv")[2], ',').at(1)), (7 + 13) / 50.0, 0.5);
}

TEST_F(TrainedTable, stops_without_patience_and_keeps_the_best) {
  const Words patient = {"--lr", "0", "--patience", "4", "--keep-best"};  // the first epoch stays the best
  const Ended first = train_mlp(patient);
  ASSERT_EQ(first.exit_code, 0) << first.error;
  EXPECT_TRUE(contains(first.error, "no lower validation loss in 4 epochs: training ends after epoch 5"));
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"step-00000015", "step-00000060", "step-00000075"}));
  EXPECT_EQ(evaluation().at("step"), 15);
  EXPECT_EQ(evaluation({"--from-step", "60"}).at("step"), 60);
  const Ended one_file = lockstep_command({"eval", "--checkpoint-dir", folder.file("run/step-00000075.safetensors")});
  EXPECT_TRUE(contains(one_file.output, "mlp after step 75")) << one_file.output;
  ASSERT_EQ(train_mlp(patient + Words{"--resume"}).exit_code, 0);
  EXPECT_EQ(lines_of(folder / "m", "epoch").size(), 5U);  // nothing was left to do
  const Ended none = train_on("classes.csv?val=0", "n", {"--model", "mlp", "--patience", "1"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_TRUE(contains(none.error, "there is no validation set"));
}

TEST_F(TrainedTable, is_refused_where_something_is_missing_or_would_be_lost) {
  EXPECT_EQ(lockstep_command({"eval"}).exit_code, 2);
  EXPECT_TRUE(contains(use("eval").error, "no checkpoint to read: there is none"));
  ASSERT_EQ(train_mlp({"--max-steps", "15"}).exit_code, 0);
  EXPECT_EQ(use("predict").exit_code, 2);
  EXPECT_TRUE(contains(use("predict", {"--output", folder.file("p.txt")}).error, "ends in .csv or .npy"));
  write_file(folder / "p.csv", "mine");
  const Ended there = use("predict", {"--output", folder.file("p.csv")});
  EXPECT_EQ(there.exit_code, 2);
  EXPECT_TRUE(contains(there.error, "already exists")) << there.error;
  EXPECT_EQ(read_file(folder / "p.csv"), "mine");
  EXPECT_TRUE(contains(use("eval", {"--from-step", "7"}).error, "no checkpoint of step 7"));
  EXPECT_EQ(use("eval", {"--epochs", "3"}).exit_code, 2);  // an option of training
}

TEST_F(TrainedTable, begins_with_weights_and_leaves_frozen_ones) {
  ASSERT_EQ(train_mlp().exit_code, 0);
  const double trained = evaluation().at("loss");
  const std::string file = folder.file("run/step-00000180.safetensors");
  for (const char* strategy : {"single", "ddp", "towers", "data_parallel", "kvstore", "averaging", "pipeline"}) {
    const bool alone = strategy == std::string("single");
    const Ended ended = train_on("classes.csv", strategy,
                                 {"--model", "mlp", "--strategy", strategy, "--ranks", alone ? "1" : "2", "--max-steps",
                                  "15", "--weights", file, "--freeze", "weight", "--lr", "0"});
    ASSERT_EQ(ended.exit_code, 0) << strategy << ended.error;
    EXPECT_NEAR(lines_of(folder / strategy, "epoch").at(0).at("val_loss").get<double>(), trained, 1e-6) << strategy;
    EXPECT_TRUE(contains(ended.error, concat("6 of the model's 6 tensors are from ", file))) << ended.error;
  }
  const Ended others = train_on("classes.csv", "o", {"--model", "mlp", "--weights", file, "--classes", "5"});
  ASSERT_EQ(others.exit_code, 0) << others.error;
  EXPECT_TRUE(contains(others.error, "4 of the model's 6 tensors are from")) << others.error;
  const Ended lenet = lockstep_command({"train", "--data", "synthetic", "--max-steps", "1", "--weights", file});
  EXPECT_TRUE(contains(lenet.error, "has none of the model's 8 tensors in its shape")) << lenet.error;
  const Ended nothing = train_on("classes.csv", "o", {"--model", "mlp", "--freeze", "layer9"});
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_TRUE(contains(nothing.error, "matches 0 of 6 parameters")) << nothing.error;
}

TEST_F(TrainedTable, trains_nothing_that_is_frozen) {
  const Words both = {"--model", "mlp", "--max-steps", "15", "--ranks", "2"};
  ASSERT_EQ(train_on("classes.csv", "a", both + Words{"--lr", "0", "--checkpoint-dir", folder.file("a.run")}).exit_code,
            0);
  ASSERT_EQ(train_on("classes.csv", "b", both + Words{"--freeze", "weight", "--checkpoint-dir", folder.file("b.run")})
                .exit_code,
            0);
  // The bytes of the weights are the same in both, those of the biases are not.
  const std::string a = read_file(folder / "a.run/step-00000015.safetensors");
  const std::string b = read_file(folder / "b.run/step-00000015.safetensors");
  const auto tensor = [](const std::string& file, const std::string& name) {
    uint64_t head = 0;
    std::memcpy(&head, file.data(), sizeof head);
    const auto entry = nlohmann::json::parse(file.substr(8, head)).at(name).at("data_offsets");
    return file.substr(8 + head + entry[0].get<size_t>(), entry[1].get<size_t>() - entry[0].get<size_t>());
  };
  std::set<std::string> same;
  for (const char* name : {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"})
    if (tensor(a, concat("model.", name)) == tensor(b, concat("model.", name))) same.insert(name);
  EXPECT_EQ(same, (std::set<std::string>{"layers.0.weight", "layers.2.weight"}));
}

}  // namespace
}  // namespace lockstep
