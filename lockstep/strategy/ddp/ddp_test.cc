// SPDX-License-Identifier: Apache-2.0
#include "lockstep/ddp.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <cmath>

#include "lockstep/optimizers.h"
#include "lockstep/periodic_average.h"
#include "tests/one_weight.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::batch_of_rank;
using testing::contains;
using testing::message_of;
using testing::OneWeight;
using testing::trained_alone;

TEST(Ddp, sends_rank_0s_buffers_after_each_backward) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(2));
    DistributedDataParallel ddp(world, *net);
    ddp.backward(net->forward(torch::full({4, 2}, 10.0F * static_cast<float>(world.rank()))).sum(), 4);
    EXPECT_TRUE(torch::equal(net->named_buffers()["0.running_mean"], torch::zeros({2}))) << world.rank();
  });
}

TEST(Ddp, sends_rank_0s_buffers_after_a_plain_backward) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(2));
    const DistributedDataParallel ddp(world, *net);
    net->forward(torch::full({4, 2}, 10.0F * static_cast<float>(world.rank()))).sum().backward();
    EXPECT_TRUE(torch::equal(net->named_buffers()["0.running_mean"], torch::zeros({2}))) << world.rank();
    EXPECT_EQ(ddp.last_batch().samples, 2);
    EXPECT_TRUE(std::isnan(ddp.last_batch().mean_loss));
  });
}

TEST(Ddp, refuses_to_go_on_after_a_backward_that_failed) {
  torch::nn::Linear net(2, 1);
  DistributedDataParallel ddp(World::single(), *net);
  const torch::Tensor input = torch::ones({1, 2}, torch::TensorOptions().requires_grad(true));
  input.register_hook([](torch::Tensor) -> torch::Tensor { throw DataError({.what = "thrown in backward"}); });
  EXPECT_THROW(ddp.backward(net->forward(input).sum(), 1), DataError);
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         ddp.backward(net->forward(torch::ones({1, 2})).sum(), 1);
                       }),
                       "failed half-way"));
}

TEST(Ddp, works_with_any_optimizer_of_torch_and_a_plain_backward) {
  run_ranks(2, [](World& world) {
    torch::nn::Linear net(2, 1);
    torch::optim::Adam adam(net->parameters(), 0.1);
    const DistributedDataParallel ddp(world, *net, adam);
    net->forward(torch::full({1, 2}, 1.0F + static_cast<float>(world.rank()))).sum().backward();
    EXPECT_TRUE(torch::equal(net->weight.grad(), torch::full({1, 2}, 1.5F)));
    adam.step();
    const torch::Tensor weights = world.all_gather(net->weight.detach());
    EXPECT_TRUE(torch::equal(weights[0], weights[1]));
  });
}

TEST(Ddp, brings_out_what_one_rank_throws_in_the_middle_of_backward) {
  const auto throw_in_rank_1 = [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 1));
    DistributedDataParallel ddp(world, *net, {.bucket_bytes = 8});
    const torch::Tensor hidden = net[0]->as<torch::nn::Linear>()->forward(torch::ones({2, 4}));
    if (world.rank() == 1)
      hidden.register_hook([](torch::Tensor) -> torch::Tensor { throw DataError({.what = "thrown in backward"}); });
    ddp.backward(net[1]->as<torch::nn::Linear>()->forward(hidden).sum(), 2);
  };
  EXPECT_TRUE(contains(message_of<DataError>([&] { run_ranks(2, throw_in_rank_1); }), "thrown in backward"));
}

TEST(Ddp, names_the_parameters_without_a_gradient_if_all_have_to_be_used) {
  const auto use_one_of_two = [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel ddp(world, *net, sgd, {.find_unused_parameters = false});
    ddp.backward(net[0]->as<torch::nn::Linear>()->forward(torch::ones({1, 2})).sum(), 1);
  };
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { run_ranks(2, use_one_of_two); }), "no gradient for 1.weight, 1.bias"));
}

TEST(Ddp, lets_ranks_run_out_of_batches_at_different_times) {
  for (const bool share : {true, false}) {
    std::vector<std::vector<torch::Tensor>> steps(4);
    for (int step = 0; step < 4; ++step)
      for (int rank = 0; rank < 3; ++rank)
        if (step < 2 + rank) steps[step].push_back(batch_of_rank(rank, step, rank + 1));
    run_ranks(3, [&](World& world) {
      OneWeight net;
      SGD sgd(net->parameters(), {.lr = 0.01});
      DistributedDataParallel ddp(world, *net, sgd, {.share_parameters = share});
      for (int step = 0; step < std::min(4, 2 + world.rank()); ++step) {
        ddp.backward(net->loss(batch_of_rank(world.rank(), step, world.rank() + 1)), world.rank() + 1);
        sgd.step();
        sgd.zero_grad();
      }
      ddp.join(sgd);
      EXPECT_TRUE(torch::allclose(net->w.detach(), trained_alone(steps), 1e-12, 0)) << net->w;
      world.barrier();
    });
  }
}

TEST(Ddp, goes_on_with_a_plain_backward_after_join) {
  for (const int ranks : {1, 2})
    run_ranks(ranks, [](World& world) {
      OneWeight net;
      SGD sgd(net->parameters(), {.lr = 0.5});
      DistributedDataParallel ddp(world, *net, sgd, {.mean_in_grad = true});
      ddp.backward(net->w.sum(), 1);
      sgd.step();
      sgd.zero_grad();
      ddp.join(sgd);
      net->w.sum().backward();
      sgd.step();
      EXPECT_TRUE(torch::equal(net->w.detach(), torch::zeros({3}, torch::kFloat64))) << net->w;
      world.barrier();
    });
}

// The residual of a hook must survive an exchange in which no rank has samples.
TEST(Ddp, gives_nothing_to_a_hook_at_the_end_of_join) {
  for (const auto make_hook : {+[] { return top_k_hook(0.4); }, +[] { return two_bit_hook(0.5); }})
    run_ranks(2, [&](World& world) {
      OneWeight net;
      SGD sgd(net->parameters(), {.lr = 0.01});
      DistributedDataParallel ddp(world, *net, sgd, {.hook = make_hook()});
      ddp.join(sgd);
      ddp.backward(net->loss(batch_of_rank(world.rank(), 1, 2)), 2);
      sgd.step();
      EXPECT_TRUE(net->w.isfinite().all().item<bool>()) << net->w;
      world.barrier();
    });
}

// Two ranks with gradients g and 3g: the mean is 2g.
void expect_mean_in_grad(const DistributedDataParallelOptions& options, bool mean) {
  run_ranks(2, [&](World& world) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 0.5});
    torch::optim::Optimizer& base = sgd;
    DistributedDataParallel ddp(world, *net, base, options);
    EXPECT_EQ(ddp.mean_in_grad(), mean);
    ddp.backward(net->w.sum() * (2 * world.rank() + 1), 1);
    const double expected = mean ? 2 : 2 * world.rank() + 1;
    EXPECT_TRUE(torch::equal(net->w.grad(), torch::full({3}, expected, torch::kFloat64)));
    sgd.step();
    EXPECT_TRUE(torch::equal(net->w.detach(), torch::zeros({3}, torch::kFloat64)));
    world.barrier();
  });
}

TEST(Ddp, reads_gradients_in_shared_memory_whatever_type_the_optimizer_is_passed_as) {
  expect_mean_in_grad({}, /*mean=*/false);
}

TEST(Ddp, leaves_the_mean_in_grad_if_told_or_with_separate_parameters) {
  expect_mean_in_grad({.mean_in_grad = true}, /*mean=*/true);
  expect_mean_in_grad({.share_parameters = false}, /*mean=*/true);
}

TEST(Ddp, lets_gradients_be_clipped_by_hand_on_shared_parameters_if_grad_is_the_mean) {
  run_ranks(2, [](World& world) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel ddp(world, *net, sgd, {.mean_in_grad = true});
    ddp.backward(net->w.sum() * (2 * world.rank() + 1), 1);
    net->w.mutable_grad().clamp_(-0.5, 0.5);
    sgd.step();
    EXPECT_TRUE(torch::equal(net->w.detach(), torch::full({3}, 0.5, torch::kFloat64)));
    world.barrier();
  });
}

TEST(Ddp, adds_up_under_no_sync_and_exchanges_once) {
  for (const bool share : {true, false}) {
    run_ranks(3, [&](World& world) {
      OneWeight net;
      SGD sgd(net->parameters(), {.lr = 0.01});
      DistributedDataParallel ddp(world, *net, sgd, {.share_parameters = share});
      std::vector<torch::Tensor> all;
      for (int rank = 0; rank < 3; ++rank)
        for (int part = 0; part < 2; ++part) all.push_back(batch_of_rank(rank, part, rank + 1 + part));
      {
        const auto only_add = ddp.no_sync();
        ddp.backward(net->loss(batch_of_rank(world.rank(), 0, world.rank() + 1)) / 2, world.rank() + 1);
      }
      ddp.backward(net->loss(batch_of_rank(world.rank(), 1, world.rank() + 2)) / 2, world.rank() + 2);
      EXPECT_EQ(ddp.last_batch().samples, 15);
      sgd.step();
      EXPECT_TRUE(torch::allclose(net->w.detach(), trained_alone({all}), 1e-12, 0)) << net->w;
      world.barrier();
    });
  }
}

TEST(Ddp, averages_parameters_after_a_local_phase) {
  run_ranks(3, [](World& world) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 0.01});
    DistributedDataParallel ddp(world, *net, sgd, {.share_parameters = false});
    PeriodicAverage average(world, *net, {.first_steps = 2, .every = 3});
    for (int step = 0; step < 5; ++step) {
      if (average.is_local()) {
        const auto alone = ddp.no_sync();
        ddp.backward(net->loss(batch_of_rank(world.rank(), step, 2)), 2);
      } else {
        ddp.backward(net->loss(batch_of_rank(world.rank(), step, 2)), 2);
      }
      sgd.step();
      sgd.zero_grad();
      average.after_step();
      const torch::Tensor all = world.all_gather(net->w.detach());
      const bool alike = torch::equal(all[0], all[1]) && torch::equal(all[0], all[2]);
      EXPECT_EQ(alike, step < 2 || step == 4) << "step " << step;
    }
  });
}

TEST(Ddp, counts_what_it_exchanges) {
  for (const bool share : {true, false}) {
    run_ranks(2, [&](World& world) {
      OneWeight net;
      SGD sgd(net->parameters(), {.lr = 0.01});
      DistributedDataParallel ddp(world, *net, sgd, {.share_parameters = share});
      for (int step = 0; step < 3; ++step) {
        ddp.backward(net->loss(batch_of_rank(world.rank(), step, 2)), 2);
        sgd.step();
        sgd.zero_grad();
      }
      EXPECT_EQ(ddp.statistics().exchanges, 3);
      EXPECT_EQ(ddp.statistics().bytes, 3 * (share ? 3 : 4) * 8) << "buckets carry a flag beside the three gradients";
      world.barrier();
    });
  }
}

}  // namespace
}  // namespace lockstep
