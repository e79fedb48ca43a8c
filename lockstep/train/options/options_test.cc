// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/options/options.h"

#include <set>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/step/layout.h"
#include "lockstep/train/options/option_table.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using Words = std::vector<std::string>;

const Choices kChoices{.models = {"lenet", "mlp"}, .datasets = {"fashion-mnist"}};

TrainOptions parsed(Words words) {
  TrainOptions options;
  CLI::App app("test", "test");
  add_options(app, options, kChoices);
  std::ranges::reverse(words);  // as CLI11 wants them
  app.parse(words);
  return options;
}

std::vector<Option> table() {
  static TrainOptions defaults;
  return option_table(defaults, kChoices);
}

// The option with another value than it has by default.
Words with_another_value(const Option& option) {
  static const std::set<std::string> true_or_false{"--update-on-kvstore", "--adapt-to-delay"};
  const Json now = option.value();
  if (now.is_boolean() && !true_or_false.contains(option.name)) return {option.name};
  for (const std::string& name : option.names)
    if (now != name) return {option.name, name};
  if (now.is_string()) return {option.name, "2"};
  return {option.name, now == 0.5 ? "0.25" : now.is_number_float() ? "0.5" : now.is_boolean() ? "false" : "7"};
}

// Options under which every other one is in use.
const std::map<std::string, Words> kInUse = {
    {"--epochs", {"--schedule", "cosine"}},
    {"--beta1", {"--optimizer", "adam"}},
    {"--beta2", {"--optimizer", "adam"}},
    {"--eps", {"--optimizer", "adam"}},
    {"--lr-base-batch-size", {"--lr-scaling", "linear"}},
    {"--lr-floor", {"--schedule", "linear"}},
    {"--drop-every-epochs", {"--schedule", "step"}},
    {"--drop-factor", {"--schedule", "step"}},
    {"--kvstore", {"--strategy", "kvstore"}},
    {"--adapt-to-delay", {"--strategy", "kvstore"}},
    {"--staleness", {"--strategy", "kvstore", "--kvstore", "dist_bounded"}},
};

class OptionOf : public ::testing::TestWithParam<Option> {
 protected:
  Words in_use() const {
    const auto found = kInUse.find(GetParam().name);
    return found == kInUse.end() ? Words{} : found->second;
  }
  Words changed() const {
    Words words = in_use();
    std::ranges::copy(with_another_value(GetParam()), std::back_inserter(words));
    return words;
  }
};

INSTANTIATE_TEST_SUITE_P(Train, OptionOf, ::testing::ValuesIn(table()), [](const auto& test) {
  std::string name = test.param.name.substr(2);
  std::ranges::replace(name, '-', '_');
  return name;
});

TEST_P(OptionOf, is_part_of_the_fingerprint_exactly_if_a_resumed_run_must_have_the_same) {
  EXPECT_EQ(resume_fingerprint(parsed(in_use())) != resume_fingerprint(parsed(changed())),
            GetParam().on_resume.compared);
}

TEST_P(OptionOf, is_read_into_its_field) {
  TrainOptions before = parsed(in_use()), after = parsed(changed());
  const auto value_in = [&](TrainOptions& options) {
    for (const Option& option : option_table(options, kChoices))
      if (option.name == GetParam().name) return option.value();
    return Json();
  };
  EXPECT_NE(value_in(after), value_in(before));
}

TEST(Options, have_different_names_and_a_help_text) {
  std::set<std::string> names;
  for (const Option& option : table()) {
    EXPECT_TRUE(names.insert(option.name).second) << option.name;
    EXPECT_FALSE(option.help.empty()) << option.name;
  }
}

TEST(Options, are_few_in_the_short_help) {
  TrainOptions options;
  CLI::App app("test", "test");
  add_options(app, options, kChoices);
  const std::string few = app.help(), all = app.help("", CLI::AppFormatMode::All);
  for (const Option& option : table()) {
    EXPECT_EQ(contains(few, concat("\n  ", option.name, ' ')), option.common) << option.name;
    EXPECT_TRUE(contains(all, concat("\n  ", option.name, ' '))) << option.name;
  }
  EXPECT_LE(std::ranges::count_if(split(few, '\n'), [](const auto& line) { return line.starts_with("  -"); }), 25);
}

// Checkpoints of earlier versions have these.
TEST(Options, keep_the_names_and_kinds_of_values_that_checkpoints_hold) {
  const Json expected = Json::parse(R"({
    "model": "lenet", "data": "auto", "batch_size": 256, "augment": "", "seed": 1, "optimizer": "sgd", "lr": 0.05,
    "momentum": 0.9, "nesterov": false, "weight_decay": 0.0, "lr_scaling": "none", "lr_base_batch_size": 256,
    "schedule": "constant", "warmup_epochs": 0.0, "drop_every_epochs": 1.0, "drop_factor": 0.1,
    "precision": "float32", "layout": "auto", "clip_norm": 0.0, "clip_value": 0.0, "ema_decay": 0.0,
    "virtual_shards": 0, "compression": "none", "compression_amount": 0.0, "average_every": 1, "kvstore": "",
    "outer_lr": 1.0, "outer_momentum": 0.0, "epochs": 0})");
  const Json found = resume_fingerprint(TrainOptions());
  for (const auto& [name, value] : expected.items()) EXPECT_EQ(found.at(name), value) << name;
}

TEST(Options, of_an_optimizer_may_come_before_its_name) {
  const TrainOptions options = parsed({"--lr", "0.2", "--weight-decay", "0.1", "--optimizer", "adamw"});
  const auto& adamw = std::get<AdamWOptions>(options.strategy.optimizer);
  EXPECT_EQ(adamw.lr, 0.2);
  EXPECT_EQ(adamw.weight_decay, 0.1);
}

// The SGD of the command has momentum, unlike that of the library.
TEST(Options, leave_each_optimizer_its_defaults) {
  EXPECT_EQ(values_of(parsed({"--optimizer", "sgd"}).strategy.optimizer), values_of(TrainOptions().strategy.optimizer));
  for (const std::string& name : optimizer_names()) {
    if (name == "sgd") continue;
    EXPECT_EQ(values_of(parsed({"--optimizer", name}).strategy.optimizer), values_of(optimizer_options(name))) << name;
  }
}

TEST(Options, that_would_have_no_effect_are_refused) {
  const auto expect = [](const Words& words, const std::string& needed) {
    const std::string message = message_of<UsageError>([&] { parsed(words); });
    EXPECT_TRUE(contains(message, "has no effect")) << message;
    EXPECT_TRUE(contains(message, "it needs " + needed + ";")) << message;
  };
  expect({"--beta1", "0.9"}, "--optimizer adam or adamw or lamb");
  expect({"--beta2", "0.9", "--optimizer", "rmsprop"}, "--optimizer adam or adamw or lamb");
  expect({"--eps", "1e-8"}, "--optimizer adam or adamw or lamb or rmsprop or adagrad");
  expect({"--optimizer", "adam", "--momentum", "0.9"}, "--optimizer sgd or lars or rmsprop");
  expect({"--nesterov", "--optimizer", "lars"}, "--optimizer sgd");
  expect({"--lr-floor", "0"}, "--schedule linear or cosine");
  expect({"--drop-every-epochs", "1", "--schedule", "cosine"}, "--schedule step");
  expect({"--drop-factor", "0.1"}, "--schedule step");
  expect({"--lr-base-batch-size", "256"}, "--lr-scaling");
  EXPECT_NO_THROW(parsed({"--lr-floor", "0.1", "--schedule", "cosine", "--beta1", "0.9", "--optimizer", "lamb"}));
}

TEST(Options, leave_an_optimizer_what_only_it_has) {
  const TrainOptions options = parsed({"--beta1", "0.8", "--optimizer", "lamb"});
  const auto& lamb = std::get<LAMBOptions>(options.strategy.optimizer);
  EXPECT_EQ(lamb.beta1, 0.8);
  EXPECT_EQ(lamb.beta2, LAMBOptions().beta2);
  EXPECT_EQ(lamb.eps, LAMBOptions().eps);
  const TrainOptions adam = parsed({"--optimizer", "adam", "--eps", "1e-4"});
  EXPECT_EQ(std::get<AdamOptions>(adam.strategy.optimizer).eps, 1e-4);
}

TEST(Options, refuse_an_unknown_name_and_list_the_known_ones) {
  const auto message = [](const Words& words) { return message_of<CLI::ValidationError>([&] { parsed(words); }); };
  EXPECT_TRUE(contains(message({"--strategy", "dpp"}), "single,ddp,towers"));
  EXPECT_TRUE(contains(message({"--optimizer", "adadelta"}), "sgd,adam,adamw,lamb,lars"));
  EXPECT_TRUE(contains(message({"--layout", "nhwc"}), "auto,contiguous,channels_last"));
}

TEST(Options, refuse_numbers_out_of_range_and_name_the_option) {
  const auto message = [](const Words& words) { return message_of<UsageError>([&] { check_options(parsed(words)); }); };
  EXPECT_TRUE(contains(message({"--epochs", "0"}), "--epochs 0 is not positive"));
  EXPECT_TRUE(contains(message({"--lr=-1"}), "--lr -1 is negative"));
  EXPECT_TRUE(contains(message({"--optimizer", "adam", "--beta2", "1"}), "--beta2 1 is not below 1"));
  EXPECT_TRUE(contains(message({"--timeout", "0"}), "--timeout 0 is not positive"));
  EXPECT_TRUE(contains(message({"--timeout=-1"}), "--timeout -1 is"));
  EXPECT_TRUE(contains(message({"--ema-decay", "1"}), "--ema-decay 1 is not below 1"));
  EXPECT_TRUE(contains(message({"--resume"}), "--resume without --checkpoint-dir"));
  EXPECT_TRUE(contains(message({"--nesterov", "--momentum", "0"}), "--nesterov without --momentum"));
  EXPECT_NO_THROW(check_options(parsed({})));
}

TEST(Options, refuse_virtual_shards_that_fewer_ranks_could_not_share_out) {
  const auto check = [](const char* shards, const char* fewest, int ranks) {
    const TrainOptions options = parsed({"--virtual-shards", shards, "--min-ranks", fewest});
    require_shards_for_fewer_ranks(options.strategy.ddp.virtual_shards, options.min_ranks, ranks);
  };
  const std::string message = message_of<UsageError>([&] { check("8", "2", 4); });
  EXPECT_TRUE(contains(message, "8 virtual shards can't be divided among 3 ranks"));
  EXPECT_TRUE(contains(message, "any number of ranks from 2 to 4"));
  EXPECT_NO_THROW(check("12", "2", 4));
  EXPECT_NO_THROW(check("8", "4", 4));
  EXPECT_NO_THROW(check("8", "0", 4));  // the job ends with the first loss
  EXPECT_NO_THROW(check("0", "2", 4));
}

}  // namespace
}  // namespace lockstep
