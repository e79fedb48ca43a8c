// SPDX-License-Identifier: Apache-2.0
#include "lockstep/towers.h"

#include <torch/nn/functional/dropout.h>

#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/option_names.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

class TowersOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, TowersOfSize, ::testing::Values(1, 2, 3, 4));

StrategyOptions towers(int devices) {
  return {.kind = StrategyKind::kTowers, .optimizer = SGDOptions{.lr = 0.1}, .seed = 4, .devices = devices};
}

TEST_P(TowersOfSize, train_as_one_device_does_with_every_algorithm) {
  StrategyOptions options = towers(GetParam());
  const Course one = on_one_device(small_task(), options);
  for (const auto& [name, algorithm] : kNames<Algorithm>) {
    options.algorithm = algorithm;
    expect_same_course(course_of(small_task(), options), one);
  }
}

TEST_P(TowersOfSize, train_as_one_device_does_with_momentum) {
  StrategyOptions options = towers(GetParam());
  options.optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true};
  expect_same_course(course_of(small_task(), options), on_one_device(small_task(), options));
}

TEST_P(TowersOfSize, train_as_one_device_does_with_adam_on_shared_parameters) {
  StrategyOptions options = towers(GetParam());
  options.towers.update = UpdateOn::kCpu;
  options.optimizer = AdamWOptions{.lr = 0.01, .weight_decay = 0};
  expect_same_course(course_of(small_task(), options), on_one_device(small_task(), options));
}

TEST(Towers, train_with_fewer_samples_than_devices) {
  expect_same_course(course_of(small_task(), towers(4), 5, 2), on_one_device(small_task(), towers(4), 5, 2));
}

TEST(Towers, split_a_batch_unevenly_or_refuse_to) {
  const Devices devices({.count = 3});
  std::vector<int64_t> sizes;
  for (const Batch& shard : split_and_load(batch_of(0), devices)) sizes.push_back(shard.size());
  EXPECT_EQ(sizes, (std::vector<int64_t>{3, 3, 4}));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { split_and_load(batch_of(0), devices, Uneven::kRefuse); }),
                       "a batch of 10 samples does not divide evenly over 3 devices"));
  EXPECT_EQ(split_and_load(batch_of(0, 9), devices, Uneven::kRefuse).size(), 3U);
}

TEST(Towers, copy_the_parameters_to_every_device) {
  const Devices devices({.count = 3});
  const Replicas replicas = get_params(devices, small_task());
  const auto first = replicas[0].model->parameters(), last = replicas[2].model->parameters();
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(torch::equal(first[i], last[i]));
    EXPECT_FALSE(first[i].is_alias_of(last[i]));
    EXPECT_TRUE(last[i].requires_grad());
  }
}

TEST(Towers, sum_each_gradient_on_all_devices) {
  Devices devices({.count = 3});
  const Replicas replicas = get_params(devices, small_task());
  for (size_t device = 0; device < 2; ++device) {  // the third device has no gradient: it counts as zero
    torch::Tensor weight = replicas[device].model->parameters()[0];
    weight.mutable_grad() = torch::full_like(weight, static_cast<double>(device) + 1).detach();
  }
  all_reduce_gradients(devices, replicas, Algorithm::kCentral);
  for (const Replica& replica : replicas) {
    EXPECT_TRUE(replica.model->parameters()[0].grad().eq(3).all().item<bool>());
    EXPECT_FALSE(replica.model->parameters()[1].grad().defined());  // no device had one
  }
}

TEST(Towers, share_one_set_of_parameters) {
  Devices devices({.count = 2});
  Replicas replicas = get_params(devices, small_task());
  share_parameters(devices, replicas);
  const auto parameters = replicas[1].model->parameters();
  EXPECT_TRUE(parameters[0].is_alias_of(replicas[0].model->parameters()[0]));
  const torch::Tensor before = parameters[0].detach().clone();
  for (const Replica& replica : replicas) replica.model->parameters()[0].mutable_grad() = torch::ones_like(before);
  combine_gradients(replicas);
  replicas[0].optimizer->step();
  EXPECT_TRUE(torch::allclose(parameters[0], before - 2 * SGDOptions{}.lr));
}

TEST(Towers, train_a_layer_that_is_used_twice) {
  for (const UpdateOn update : {UpdateOn::kDevice, UpdateOn::kCpu}) {
    StrategyOptions options = towers(2);
    options.towers.update = update;
    expect_same_course(course_of(tied_task(), options), on_one_device(tied_task(), options));
  }
}

TEST(Towers, pass_on_what_the_task_throws) {
  Task task = small_task();
  task.forward = [](torch::nn::Module&, const torch::Tensor&) -> torch::Tensor {
    throw DataError({.what = "thrown in forward"});
  };
  const auto strategy = strategy_of(task, towers(2));
  EXPECT_TRUE(contains(message_of<DataError>([&] { strategy->forward_backward(batch_of(0)); }), "thrown in forward"));
}

Task with_dropout() {
  Task task = small_task();
  task.forward = [](torch::nn::Module& model, const torch::Tensor& data) {
    const auto options = torch::nn::functional::DropoutFuncOptions().p(0.3);
    return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(torch::nn::functional::dropout(data, options));
  };
  return task;
}

TEST(Towers, repeat_training_with_dropout_to_the_bit) {
  expect_same_bits(course_of(with_dropout(), towers(3)), course_of(with_dropout(), towers(3)));
  StrategyOptions other = towers(3);
  other.seed = 5;
  EXPECT_NE(course_of(with_dropout(), towers(3)).losses, course_of(with_dropout(), other).losses);
}

TEST(Towers, refuse_unknown_options) {
  const auto refusal = [](const StrategyOptions& options) {
    return message_of<UsageError>([&] { strategy_of(small_task(), options); });
  };
  EXPECT_TRUE(contains(refusal(towers(0)), "0 devices"));
  const auto make = [](World& world) { make_strategy(world, small_task(), towers(2)); };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { run_ranks(2, make); }), "has its devices in one process"));
}

TEST(Towers, copy_the_parameters_of_a_model_that_exists) {
  const Devices devices({.count = 2});
  const ModulePtr model = small_task().make_model();
  const Replicas replicas = get_params(devices, small_task(), *model, {.seed = 77});
  for (const Replica& replica : replicas)
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(replica.model->parameters()[i], model->parameters()[i]));
      EXPECT_FALSE(replica.model->parameters()[i].is_alias_of(model->parameters()[i]));
    }
  const std::string message =
      message_of<UsageError>([&] { get_params(devices, tied_task(), *model, StrategyOptions{}); });
  EXPECT_TRUE(contains(message, "names, shapes and dtypes differ"));
}

TEST_P(TowersOfSize, train_a_batch_in_one_call) {
  const StrategyOptions options = towers(GetParam());
  Devices devices({.count = GetParam(), .places = test_places(GetParam())});
  const Replicas replicas = get_params(devices, small_task(), options);
  Course course;
  for (int step = 0; step < kSteps; ++step)
    course.losses.push_back(train_batch(devices, small_task(), replicas, batch_of(step)).mean_loss);
  course.parameters = values_of(*replicas.back().model);
  expect_same_course(course, on_one_device(small_task(), options));
}

TEST_P(TowersOfSize, combine_the_gradients_of_shared_variables) {
  StrategyOptions options = towers(GetParam());
  options.optimizer = AdamOptions{.lr = 0.01};
  Devices devices({.count = GetParam()});
  const Replicas replicas = share_variables(devices, small_task(), options);
  Course course;
  for (int step = 0; step < kSteps; ++step) {
    const auto shards = split_and_load(batch_of(step), devices);
    const auto losses = tower_losses(devices, small_task(), replicas, shards);
    backward(devices, small_task(), losses, shards);
    combine_gradients(replicas);
    replicas[0].optimizer->step();
    course.losses.push_back(mean_of(losses, shards).mean_loss);
  }
  course.parameters = values_of(*replicas.back().model);
  expect_same_course(course, on_one_device(small_task(), options));
}

TEST_P(TowersOfSize, split_a_tensor_and_give_the_sum_of_gradients) {
  Devices devices({.count = GetParam()});
  const Replicas replicas = share_variables(devices, small_task(), towers(GetParam()));
  const Batch batch = batch_of(0);
  const auto shards = split_and_load(batch, devices);
  EXPECT_TRUE(torch::equal(torch::cat(split_and_load(batch.data, devices)), batch.data));
  backward(devices, small_task(), tower_losses(devices, small_task(), replicas, shards), shards);
  const auto combined = combined_gradients(replicas);
  Replica one = make_replica(small_task(), towers(1));
  copy_model(*replicas[0].model, *one.model);
  small_task().loss(one.forward(small_task(), batch), batch.target).backward();
  ASSERT_EQ(combined.size(), one.model->parameters().size());
  for (size_t i = 0; i < combined.size(); ++i) {
    EXPECT_TRUE(combined[i].variable.is_same(replicas[0].model->parameters()[i]));
    EXPECT_TRUE(torch::allclose(combined[i].gradient, one.model->parameters()[i].grad(), 1e-9, 1e-9));
  }
}

TEST(Towers, refuse_to_combine_gradients_of_variables_that_are_not_shared) {
  const Devices devices({.count = 2});
  const Replicas replicas = get_params(devices, small_task());
  EXPECT_TRUE(contains(message_of<UsageError>([&] { combine_gradients(replicas); }), "share_variables()"));
}

TEST_P(TowersOfSize, sum_a_list_of_tensors) {
  Devices devices({.count = GetParam(), .places = test_places(GetParam())});
  for (const auto& [name, algorithm] : kNames<Algorithm>) {
    std::vector<torch::Tensor> tensors;
    for (int i = 0; i < GetParam(); ++i)
      tensors.push_back(torch::full({3, 5}, i + 1.0, torch::TensorOptions(devices.where(i))));
    all_reduce(devices, tensors, algorithm);
    for (const torch::Tensor& tensor : tensors)
      EXPECT_TRUE(tensor.eq(GetParam() * (GetParam() + 1) / 2).all().item<bool>()) << name;
    tensors.push_back(torch::ones({1}));
    EXPECT_THROW(all_reduce(devices, tensors), UsageError);
  }
}

}  // namespace
}  // namespace lockstep
