// SPDX-License-Identifier: Apache-2.0
#include "lockstep/verify.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/base/text.h"
#include "lockstep/strategy/option_names.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::small_task;

class VirtualShardsOn : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, VirtualShardsOn, ::testing::Values(2, 4));

// A convolution with batch norm and dropout: what differs between arrangements unless each shard is computed alike.
struct NoisyNetImpl : torch::nn::Module {
  NoisyNetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(1, 4, 3));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    fc = register_module("fc", torch::nn::Linear(4 * 36, 10));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return fc(torch::dropout(norm(conv(x)).relu().flatten(1), 0.5, is_training()));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(NoisyNet);

Batch batch_of_5(int step) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
  return {torch::randn({5 + step, 1, 8, 8}, generator), torch::randint(0, 10, {5 + step}, generator, torch::kInt64)};
}

TEST_P(VirtualShardsOn, ranks_give_the_same_bits_on_any_number_of_ranks) {
  const VerifyOptions options{
      .ranks = GetParam(),
      .steps = 4,
      .double_precision = false,
      .strategy = {.optimizer = LAMBOptions{}, .clipping = {.max_norm = 1}, .seed = 3, .ddp = {.virtual_shards = 4}}};
  const VerifyReport report = verify(classification_task<NoisyNet>("noisy"), batch_of_5, options);
  EXPECT_TRUE(report.same_bits) << report.describe();
}

TEST(VirtualShards, are_refused_if_the_ranks_do_not_divide_them) {
  const auto make = [](World& world) { make_strategy(world, small_task(), {.ddp = {.virtual_shards = 4}}); };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { run_ranks(3, make); }), "4 virtual shards on 3 ranks"));
}

Batch small_batch(int step) { return testing::batch_of(step); }

TEST(Verify, finds_a_task_that_can_be_trained_on_many_ranks) {
  const VerifyReport report = verify(small_task(), small_batch, {.ranks = 3, .steps = 2});
  EXPECT_TRUE(report.equal) << report.describe();
  EXPECT_EQ(report.differences.size(), 8);
}

TEST(Verify, finds_that_a_mean_over_what_the_task_counts_is_one_of_all_ranks) {
  Task task = testing::counted_task();
  EXPECT_TRUE(verify(task, testing::counted_batch, {.ranks = 3, .steps = 2}).equal);
  task.samples = nullptr;
  EXPECT_FALSE(verify(task, testing::counted_batch, {.ranks = 3, .steps = 2}).equal);
}

TEST(Verify, names_the_first_parameter_that_differs) {
  Task task = small_task();
  task.loss = [](const torch::Tensor& output, const torch::Tensor& target) {  // a sum, not a mean: wrong on many ranks
    return torch::cross_entropy_loss(output, target) * static_cast<double>(target.size(0));
  };
  const VerifyReport report = verify(task, small_batch, {.ranks = 2, .steps = 1});
  EXPECT_FALSE(report.equal);
  EXPECT_TRUE(contains(report.describe(), "first parameter that differs is 0.weight")) << report.describe();
}

TEST(Options, refuse_an_unknown_name_and_list_the_known_ones) {
  const auto precision = [] { value_named<Precision>("float8", "--precision"); };
  EXPECT_TRUE(contains(message_of<UsageError>(precision), "--precision float8: there is no such value"));
  EXPECT_TRUE(contains(message_of<UsageError>(precision), "float32, bfloat16"));
  EXPECT_THROW(value_named<Algorithm>("star", "--algorithm"), UsageError);
  EXPECT_THROW(value_named<Compression>("zip", "--compression"), UsageError);
  EXPECT_THROW(value_named<KVStoreKind>("remote", "--kvstore"), UsageError);
  EXPECT_THROW(value_named<UpdateOn>("gpu", "--update"), UsageError);
  EXPECT_THROW(value_named<std::optional<Layout>>("nhwc", "--layout"), UsageError);
}

TEST(Strategy, single_refuses_several_ranks) {
  const auto make = [](World& world) { make_strategy(world, small_task(), {.kind = StrategyKind::kSingle}); };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { run_ranks(2, make); }), "there are 2"));
}

}  // namespace
}  // namespace lockstep
