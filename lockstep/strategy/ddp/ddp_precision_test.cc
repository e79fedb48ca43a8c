// SPDX-License-Identifier: Apache-2.0
// Loss scaling, 16-bit parameters, gradients of gradients, and batch normalisation over all ranks.
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/ddp.h"
#include "lockstep/gradient_scaler.h"
#include "lockstep/optimizers.h"
#include "lockstep/sampler.h"
#include "lockstep/sync_batch_norm.h"
#include "tests/one_weight.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::batch_of_rank;
using testing::contains;
using testing::message_of;
using testing::OneWeight;
using testing::trained_alone;

TEST(Ddp, halves_the_loss_scale_when_gradients_overflow_on_one_rank) {
  run_ranks(2, [](World& world) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 0.01});
    DistributedDataParallel ddp(world, *net, sgd);
    GradientScaler scaler({.initial_scale = 8, .growth_interval = 1});
    torch::Tensor loss = net->loss(batch_of_rank(0, 0, 2));
    if (world.rank() == 1) loss = loss * std::numeric_limits<double>::infinity();
    ddp.backward(scaler.scale(loss), 2);
    EXPECT_FALSE(scaler.step(sgd));
    EXPECT_EQ(scaler.current_scale(), 4);
    EXPECT_TRUE(torch::equal(net->w.detach(), torch::ones({3}, torch::kFloat64)));
    sgd.zero_grad();
    ddp.backward(scaler.scale(net->loss(batch_of_rank(0, 0, 2))), 2);
    EXPECT_TRUE(scaler.step(sgd));
    EXPECT_EQ(scaler.current_scale(), 8);
    EXPECT_TRUE(torch::allclose(net->w.detach(), trained_alone({{batch_of_rank(0, 0, 2)}}), 1e-12, 0));
    world.barrier();
  });
}

TEST(Ddp, adjusts_the_loss_scale_of_a_rank_in_join_as_that_of_the_others) {
  for (const bool shares : {true, false})
    run_ranks(2, [&](World& world) {
      OneWeight net;
      SGD sgd(net->parameters(), {.lr = 0.01});
      DistributedDataParallel ddp(world, *net, sgd, {.share_parameters = shares});
      GradientScaler scaler({.initial_scale = 8, .growth_interval = 2});
      const auto step = [&] {
        ddp.backward(scaler.scale(net->loss(batch_of_rank(0, 0, 2))), 2);
        scaler.step(sgd);
        sgd.zero_grad();
      };
      for (int i = 0; i < (world.rank() == 0 ? 3 : 1); ++i) step();
      ddp.join(sgd);
      EXPECT_EQ(scaler.current_scale(), 16);
      step();
      EXPECT_EQ(scaler.current_scale(), 32);
      const std::vector<torch::Tensor> batch{batch_of_rank(0, 0, 2)};
      EXPECT_TRUE(torch::allclose(net->w.detach(), trained_alone({batch, batch, batch, batch}), 1e-12, 0));
      world.barrier();
    });
}

TEST(Ddp, leaves_a_step_out_when_gradients_overflow_at_a_loss_scale_of_one) {
  run_ranks(2, [](World& world) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 0.01});
    DistributedDataParallel ddp(world, *net, sgd);
    GradientScaler scaler({.initial_scale = 1});
    torch::Tensor loss = net->loss(batch_of_rank(0, 0, 2));
    if (world.rank() == 1) loss = loss * std::numeric_limits<double>::infinity();
    ddp.backward(scaler.scale(loss), 2);
    EXPECT_FALSE(scaler.step(sgd));
    EXPECT_TRUE(torch::equal(net->w.detach(), torch::ones({3}, torch::kFloat64)));
    world.barrier();
  });
}

// bfloat16 parameters with float32 originals: small steps are not lost to rounding.
TEST(Ddp, trains_bfloat16_parameters_through_float32_originals) {
  run_ranks(2, [](World& world) {
    torch::nn::Linear net(torch::nn::LinearOptions(4, 1).bias(false));
    {
      const torch::NoGradGuard no_grad;
      net->weight.fill_(1);
    }
    net->to(torch::kBFloat16);
    SGD sgd(net->parameters(), {.lr = 1.0 / 1024});  // steps of 2^-10; bfloat16 keeps 2^-8 at 1
    DistributedDataParallel ddp(world, *net, sgd);
    for (int step = 0; step < 64; ++step) {
      ddp.backward(net->forward(torch::ones({1, 4}, torch::kBFloat16)).sum(), 1);
      sgd.step();
      sgd.zero_grad();
    }
    EXPECT_TRUE(torch::equal(net->weight.detach().to(torch::kFloat32), torch::full({1, 4}, 1 - 64.0F / 1024)));
    world.barrier();
  });
}

// A gradient of a gradient, through a parameter that is used twice.
torch::Tensor penalised_loss(OneWeight& net, const torch::Tensor& data) {
  const torch::Tensor loss = net->loss(data) + net->loss(data * 0.5);
  const torch::Tensor gradient = torch::autograd::grad({loss}, {net->w}, {}, std::nullopt, /*create_graph=*/true)[0];
  return loss + gradient.square().sum() * 0.01;
}

TEST(Ddp, takes_a_parameter_used_twice_and_a_double_backward) {
  OneWeight alone;
  penalised_loss(alone, batch_of_rank(1, 1, 2)).backward();
  const torch::Tensor expected = alone->w.detach() - 0.01 * alone->w.grad();
  run_ranks(2, [&](World& world) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 0.01});
    DistributedDataParallel ddp(world, *net, sgd);
    ddp.backward(penalised_loss(net, batch_of_rank(1, 1, 2)), 2);
    sgd.step();
    EXPECT_TRUE(torch::allclose(net->w.detach(), expected, 1e-12, 0));
    world.barrier();
  });
}

TEST(Ddp, refuses_a_loss_scale_beside_a_hook_that_keeps_a_residual) {
  for (const auto& hook : {two_bit_hook(), top_k_hook(), power_sgd_hook()}) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 0.01});
    const DistributedDataParallel ddp(World::single(), *net, sgd, {.hook = hook});
    GradientScaler scaler;
    EXPECT_TRUE(contains(message_of<UsageError>([&] { scaler.step(sgd); }), "hook that keeps a residual"));
  }
  OneWeight net;
  SGD sgd(net->parameters(), {.lr = 0.01});
  const DistributedDataParallel ddp(World::single(), *net, sgd, {.hook = sixteen_bit_hook(torch::kFloat16)});
  EXPECT_NO_THROW(sgd.set_loss_scale(2));
}

// The mean over the global batch, forward and backward, as one rank has it.
TEST(Ddp, synchronised_batch_norm_equals_one_rank_on_the_whole_batch) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(2);
  const torch::Tensor whole = torch::randn({7, 3, 4, 4}, generator, torch::kFloat64);
  const torch::Tensor factor = torch::randn({7, 3, 4, 4}, generator, torch::kFloat64);
  torch::nn::BatchNorm2d reference(torch::nn::BatchNorm2dOptions(3));
  reference->to(torch::kFloat64);
  const torch::Tensor x = whole.clone().set_requires_grad(true);
  (reference(x) * factor).sum().backward();
  run_ranks(3, [&](World& world) {
    SyncBatchNorm norm(world, SyncBatchNormOptions{.features = 3});
    norm->to(torch::kFloat64);
    const Range mine = even_part(7, world.rank(), 3);
    const torch::Tensor part = whole.slice(0, mine.begin, mine.end).clone().set_requires_grad(true);
    const auto samples = static_cast<double>(mine.end - mine.begin);
    ((norm(part) * factor.slice(0, mine.begin, mine.end)).sum() / samples).backward();
    EXPECT_TRUE(torch::allclose(part.grad() * samples, x.grad().slice(0, mine.begin, mine.end), 1e-9, 1e-9));
    EXPECT_TRUE(torch::allclose(norm->running_mean, reference->running_mean, 1e-12, 1e-12));
    EXPECT_TRUE(torch::allclose(norm->running_var, reference->running_var, 1e-12, 1e-12));
    const torch::Tensor weight_gradient = norm->weight.grad() * samples;
    world.all_reduce(weight_gradient);
    EXPECT_TRUE(torch::allclose(weight_gradient, reference->weight.grad(), 1e-9, 1e-9));
  });
}

// Its backward() would wait for ranks that do not come.
TEST(Ddp, refuses_synchronised_batch_norm_of_what_needs_a_gradient_on_some_ranks) {
  run_ranks(3, [](World& world) {
    SyncBatchNorm norm(world, SyncBatchNormOptions{.features = 3});
    const torch::Tensor input = torch::ones({2, 3}).set_requires_grad(world.rank() == 1);
    const std::string error = message_of<MismatchError>([&] { norm(input); });
    EXPECT_TRUE(contains(error, "the input of SyncBatchNorm needs a gradient on 1 ranks only"));
    EXPECT_TRUE(contains(error, world.rank() == 1 ? "where it does\n" : "where it does not"));
  });
}

}  // namespace
}  // namespace lockstep
