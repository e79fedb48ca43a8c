// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include <gtest/gtest.h>

#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using Sizes = std::vector<int64_t>;

int64_t parameters_in(const torch::nn::Module& model) {
  int64_t count = 0;
  for (const torch::Tensor& parameter : model.parameters()) count += parameter.numel();
  return count;
}

struct Published {
  const char* name;
  int64_t parameters;
};

class PublishedModel : public ::testing::TestWithParam<Published> {};
INSTANTIATE_TEST_SUITE_P(Models, PublishedModel,
                         ::testing::Values(Published{"lenet", 129068}, Published{"mlp", 669706},
                                           Published{"mlp-wide", 20037642}, Published{"alexnet", 61100840},
                                           Published{"inception", 6624904}, Published{"resnet18", 11689512},
                                           Published{"resnet34", 21797672}, Published{"resnet50", 25557032},
                                           Published{"resnet18-32", 11173962}, Published{"resnet34-32", 21282122},
                                           Published{"resnet50-32", 23520842}, Published{"gpt2", 124439808},
                                           Published{"gpt-mini", 842496}, Published{"gpt-char", 10795008}),
                         [](const auto& model) {
                           std::string name = model.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(PublishedModel, has_the_published_number_of_parameters) {
  const Task task = model_task(GetParam().name);
  EXPECT_EQ(parameters_in(*task.make_model()), GetParam().parameters);
}

torch::Tensor random_batch(const SampleShape& shape, int64_t samples) {
  Sizes sizes = {samples};
  sizes.insert(sizes.end(), shape.sizes.begin(), shape.sizes.end());
  return shape.tokens ? torch::randint(0, shape.classes, sizes, torch::kInt64) : torch::randn(sizes);
}

// The models that a CPU runs in a moment.
class SmallModel : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, SmallModel,
                         ::testing::Values("lenet", "mlp", "alexnet", "inception", "resnet18-32", "resnet50-32",
                                           "gpt-mini"));

TEST_P(SmallModel, gives_a_loss_and_a_gradient_for_every_parameter) {
  const Task task = model_task(GetParam());
  const auto model = task.make_model();
  const torch::Tensor output = task.forward(*model, random_batch(task.sample, 2));
  EXPECT_EQ(output.size(-1), task.sample.classes);
  const Sizes targets = task.sample.tokens ? Sizes{2, task.sample.sizes[0]} : Sizes{2};
  const torch::Tensor target = torch::randint(0, task.sample.classes, targets, torch::kInt64);
  const torch::Tensor loss = task.loss(output, target);
  EXPECT_TRUE(torch::isfinite(loss).item<bool>());
  EXPECT_LE(task.correct(output, target).item<double>(), 2);
  loss.backward();
  for (const auto& item : model->named_parameters()) EXPECT_TRUE(item.value().grad().defined()) << item.key();
}

TEST_P(SmallModel, computes_the_same_piece_by_piece) {
  const Task task = model_task(GetParam());
  const auto model = task.make_model();
  model->eval();
  const torch::NoGradGuard no_grad;
  const torch::Tensor data = random_batch(task.sample, 2);
  const auto pieces = task.stages(*model);
  EXPECT_GE(pieces.size(), 3U);
  EXPECT_TRUE(torch::equal(run_pieces(pieces, data), task.forward(*model, data)));
  EXPECT_EQ(parameters_of(pieces).size(), model->parameters().size());
}

TEST(ResNet, gives_a_logit_per_class_in_both_forms) {
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(ResNet(ResNetOptions{.classes = 7})->forward(torch::rand({2, 3, 64, 64})).sizes(), (Sizes{2, 7}));
  ResNet small(ResNetOptions{.classes = 7, .small_images = true});
  EXPECT_EQ(small->forward(torch::rand({2, 3, 32, 32})).sizes(), (Sizes{2, 7}));
}

TEST(ResNet, has_a_piece_per_residual_block) {
  EXPECT_EQ(ResNet(ResNetOptions{.layers = 18})->pieces().size(), 10U);
  EXPECT_EQ(ResNet(ResNetOptions{.layers = 50})->pieces().size(), 18U);
}

TEST(ResNet, refuses_an_unpublished_depth) {
  EXPECT_TRUE(contains(message_of<UsageError>([] { ResNet(ResNetOptions{.layers = 20}); }), "no ResNet of 20 layers"));
}

TEST(GPT, sees_no_later_token) {
  GPT gpt(GPTOptions{.vocabulary = 11, .context = 6, .layers = 2, .heads = 2, .width = 8});
  gpt->eval();
  const torch::NoGradGuard no_grad;
  const torch::Tensor tokens = torch::randint(0, 11, {1, 6}, torch::kInt64);
  torch::Tensor other = tokens.clone();
  other[0][5] = (other[0][5] + 1) % 11;
  const torch::Tensor a = gpt->forward(tokens), b = gpt->forward(other);
  EXPECT_TRUE(torch::allclose(a.narrow(1, 0, 5), b.narrow(1, 0, 5), 1e-6, 1e-6));
  EXPECT_FALSE(torch::allclose(a, b, 1e-6, 1e-6));
}

TEST(GPT, begins_with_the_loss_of_a_guess) {
  const Task task = gpt_task("tiny", {.vocabulary = 64, .context = 16, .layers = 2, .heads = 2, .width = 32});
  const torch::Tensor tokens = torch::randint(0, 64, {4, 16}, torch::kInt64);
  EXPECT_NEAR(task.loss(task.forward(*task.make_model(), tokens), tokens.roll(1, 1)).item<double>(), std::log(64), 0.2);
}

TEST(GPT, refuses_heads_that_do_not_divide_the_width) {
  const auto make = [] { GPT(GPTOptions{.heads = 5, .width = 8}); };
  EXPECT_TRUE(contains(message_of<UsageError>(make), "width 8 with 5 heads"));
}

TEST(Models, lists_the_known_names_for_an_unknown_one) {
  EXPECT_TRUE(contains(message_of<UsageError>([] { model_task("lennet"); }), "lenet, mlp, mlp-wide, alexnet"));
}

torch::Tensor output_for(const char* name, const SampleShape& sample) {
  const Task task = model_task(name).fit(sample);
  EXPECT_EQ(task.sample, sample) << name;
  return task.forward(*task.make_model(), random_batch(sample, 2));
}

TEST(FittedModel, has_inputs_and_outputs_of_the_samples) {
  EXPECT_EQ(output_for("lenet", {.sizes = {3, 32, 20}, .classes = 7}).sizes(), (Sizes{2, 7}));
  EXPECT_EQ(output_for("mlp", {.sizes = {13}, .classes = 3}).sizes(), (Sizes{2, 3}));
  EXPECT_EQ(output_for("mlp", {.sizes = {10}, .numbers = 2}).sizes(), (Sizes{2, 2}));
  EXPECT_EQ(output_for("alexnet", {.sizes = {3, 64, 64}, .classes = 2}).sizes(), (Sizes{2, 2}));
  EXPECT_EQ(output_for("inception", {.sizes = {3, 32, 32}, .classes = 5}).sizes(), (Sizes{2, 5}));
  EXPECT_EQ(output_for("resnet18-32", {.sizes = {3, 32, 32}, .classes = 100}).sizes(), (Sizes{2, 100}));
  EXPECT_EQ(output_for("gpt-mini", {.sizes = {32}, .classes = 256, .tokens = true}).sizes(), (Sizes{2, 32, 256}));
  EXPECT_EQ(output_for("gpt-mini", {.sizes = {200}, .classes = 300, .tokens = true}).sizes(), (Sizes{2, 200, 300}));
}

TEST(FittedModel, has_the_mean_squared_error_of_numbers_as_loss) {
  const Task task = model_task("mlp").fit({.sizes = {4}, .numbers = 1});
  EXPECT_EQ(task.loss(torch::tensor({{1.F}, {3.F}}), torch::tensor({{0.F}, {0.F}})).item<float>(), 5);
  EXPECT_FALSE(task.correct);
}

TEST(FittedModel, refuses_samples_that_it_cannot_take) {
  const auto refusal = [](const char* name, const SampleShape& sample) {
    return message_of<UsageError>([&] { model_task(name).fit(sample); });
  };
  EXPECT_TRUE(contains(refusal("resnet18", {.sizes = {1, 28, 28}, .classes = 10}), "takes colour images"));
  EXPECT_TRUE(contains(refusal("lenet", {.sizes = {1, 8, 8}, .classes = 10}), "at least 14 x 14"));
  EXPECT_TRUE(contains(refusal("lenet", {.sizes = {13}, .classes = 3}), "choose another --model"));
  EXPECT_TRUE(contains(refusal("alexnet", {.sizes = {3, 64, 64}, .numbers = 1}), "1 numbers to predict"));
  EXPECT_TRUE(
      contains(refusal("mlp", {.sizes = {16}, .classes = 256, .tokens = true}), "takes floating-point numbers"));
  EXPECT_TRUE(contains(refusal("mlp", {.sizes = {4}, .classes = 2'000'000}), "numbers=1"));
  EXPECT_TRUE(contains(refusal("gpt2", {.sizes = {16}, .classes = 3}), "takes tokens"));
}

}  // namespace
}  // namespace lockstep
