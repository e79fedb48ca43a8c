// SPDX-License-Identifier: Apache-2.0
#include "lockstep/communication_hook.h"

#include <cmath>

#include "lockstep/step/accumulated_batches.h"
#include "lockstep/step/exchange.h"
#include "tests/support.h"

namespace lockstep {
namespace {

class HookOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, HookOfSize, ::testing::Values(1, 2, 3, 4, 7));

GradientBucket bucket_of(const torch::Tensor& flat) { return {.number = 0, .flat = flat, .parts = {flat}}; }

torch::Tensor sum_through(CommunicationHook& hook, const World& world, const torch::Tensor& mine) {
  const torch::Tensor flat = mine.clone();
  hook.start(world, bucket_of(flat))();
  return flat;
}

TEST_P(HookOfSize, sixteen_bits_sum_small_integers_exactly) {
  run_ranks(GetParam(), [](World& world) {
    for (const auto dtype : {torch::kFloat16, torch::kBFloat16}) {
      const torch::Tensor sum = sum_through(*sixteen_bit_hook(dtype), world, torch::full({33}, world.rank() + 1.0F));
      EXPECT_TRUE(torch::equal(sum, torch::full({33}, world.size() * (world.size() + 1) / 2.0F)));
    }
  });
}

TEST_P(HookOfSize, two_bits_send_the_rest_later) {
  run_ranks(GetParam(), [](World& world) {
    const auto hook = two_bit_hook(0.5);
    const auto ranks = static_cast<float>(world.size());
    // 0.25 a step with a threshold of 0.5: sent every other step, and nothing is lost for good.
    torch::Tensor sent = torch::zeros({37});
    for (int step = 0; step < 20; ++step) {
      torch::Tensor gradient = torch::full({37}, 0.25F);
      gradient[5] = -0.25F;
      sent += sum_through(*hook, world, gradient);
    }
    torch::Tensor expected = torch::full({37}, 5.0F * ranks);
    expected[5] = -5.0F * ranks;
    EXPECT_TRUE(torch::equal(sent, expected));
  });
}

// A bucket whose values were divided by 4, with what was kept of one that was not divided.
TEST_P(HookOfSize, what_is_sent_later_counts_as_much_in_another_unit) {
  run_ranks(GetParam(), [](World& world) {
    for (const auto& hook : {two_bit_hook(0.5), top_k_hook(0.5)}) {
      torch::Tensor flat = torch::tensor({0.4F, 2.0F});
      hook->start(world, {.number = 0, .flat = flat, .parts = {flat}, .unit = 1})();
      flat = torch::tensor({0.5F, 0.0F});
      hook->start(world, {.number = 0, .flat = flat, .parts = {flat}, .unit = 4})();
      // 0.4 / 4 is added to it: both 0.5 and 0.6 send at least the threshold, and top-k all that there is.
      const float sent = flat[0].item<float>() / static_cast<float>(world.size());
      EXPECT_TRUE(std::abs(sent - 0.5F) < 1e-6F || std::abs(sent - 0.6F) < 1e-6F) << sent;
    }
  });
}

TEST_P(HookOfSize, top_k_sends_the_largest_first_and_the_rest_later) {
  run_ranks(GetParam(), [](World& world) {
    const auto hook = top_k_hook(0.25);
    const torch::Tensor gradient = torch::tensor({1.0F, -8.0F, 2.0F, 4.0F, 0.0F, 0.0F, 0.0F, 0.0F});
    const auto ranks = static_cast<float>(world.size());
    EXPECT_TRUE(torch::equal(sum_through(*hook, world, gradient),
                             torch::tensor({0.0F, -8.0F, 0.0F, 4.0F, 0.0F, 0.0F, 0.0F, 0.0F}) * ranks));
    EXPECT_TRUE(torch::equal(sum_through(*hook, world, torch::zeros({8})),
                             torch::tensor({1.0F, 0.0F, 2.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F}) * ranks));
  });
}

TEST_P(HookOfSize, power_sgd_is_exact_for_matrices_of_low_rank) {
  run_ranks(GetParam(), [](World& world) {
    const auto hook = power_sgd_hook({.rank = 2});
    const torch::Tensor u = torch::linspace(1, 2, 12).view({12, 1});
    const torch::Tensor v = torch::linspace(-1, 1, 10).view({1, 10});
    const torch::Tensor bias = torch::full({3}, world.rank() + 1.0F);
    double sum = 0;
    for (int rank = 0; rank < world.size(); ++rank) sum += rank + 1;
    for (int step = 0; step < 3; ++step) {
      const torch::Tensor flat = torch::cat({(u.matmul(v) * (world.rank() + 1.0)).flatten(), bias});
      const GradientBucket bucket{
          .number = 3, .flat = flat, .parts = {flat.narrow(0, 0, 120).view({12, 10}), flat.narrow(0, 120, 3)}};
      hook->start(world, bucket)();
      EXPECT_TRUE(torch::allclose(bucket.parts[0], u.matmul(v) * sum, 1e-4, 1e-4));
      EXPECT_TRUE(torch::equal(bucket.parts[1], torch::full({3}, static_cast<float>(sum))));
    }
  });
}

// start() runs inside of backward(), where another group may exchange too, as SyncBatchNorm's does; on each rank at
// another place.
TEST_P(HookOfSize, starting_waits_for_nobody) {
  run_ranks(GetParam(), [](World& world) {
    const World other = *world.split(0);
    for (const auto& hook : {sixteen_bit_hook(torch::kFloat16), two_bit_hook(0.5), top_k_hook(0.5), power_sgd_hook()}) {
      const torch::Tensor flat = torch::ones({6});
      CommunicationHook::Finish finish;
      if (world.rank() == 0) finish = hook->start(world, bucket_of(flat));
      other.all_reduce(torch::ones({3}));
      if (world.rank() != 0) finish = hook->start(world, bucket_of(flat));
      finish();
    }
  });
}

// Least squares: the loss after so many steps of gradient descent, with a hook.
double loss_after(int ranks, Compression hook, double amount, int steps) {
  double result = 0;
  run_ranks(ranks, [&](World& world) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    const torch::Tensor wanted = torch::randn({20, 16}, generator);
    const torch::Tensor data = torch::randn({ranks, 32, 16}, generator)[world.rank()];
    const torch::Tensor w = torch::zeros({20, 16}).set_requires_grad(true);
    const auto reducer = exchange_in_buckets(world, {{"w", w}}, {.hook = make_hook({.kind = hook, .amount = amount})});
    for (int step = 0; step < steps; ++step) {
      w.mutable_grad().reset();
      const torch::Tensor loss = (data.matmul(w.t()) - data.matmul(wanted.t())).square().mean();
      run_backward(loss, reducer->begin(32, loss));
      const BatchTotals totals = reducer->finish();
      if (world.rank() == 0) result = totals.mean_loss;
      const torch::NoGradGuard no_grad;
      w.sub_(w.grad(), 2.0);
    }
  });
  return result;
}

TEST(CommunicationHook, training_converges_with_each_of_them) {
  const double start = loss_after(2, Compression::kNone, 0, 1);
  EXPECT_LT(loss_after(2, Compression::kNone, 0, 120), 1e-3 * start);
  EXPECT_LT(loss_after(2, Compression::kFloat16, 0, 120), 1e-3 * start);
  EXPECT_LT(loss_after(2, Compression::kBFloat16, 0, 120), 1e-3 * start);
  EXPECT_LT(loss_after(2, Compression::kPowerSGD, 4, 120), 1e-3 * start);
  EXPECT_LT(loss_after(2, Compression::kTopK, 0.2, 120), 1e-3 * start);
  EXPECT_LT(loss_after(2, Compression::kTwoBit, 0.02, 400), 1e-2 * start);
}

TEST(CommunicationHook, refuses_what_makes_no_sense) {
  EXPECT_THROW(sixteen_bit_hook(torch::kFloat32), UsageError);
  EXPECT_THROW(two_bit_hook(0), UsageError);
  EXPECT_THROW(top_k_hook(1.5), UsageError);
  EXPECT_THROW(power_sgd_hook({.rank = 0}), UsageError);
}

}  // namespace
}  // namespace lockstep
