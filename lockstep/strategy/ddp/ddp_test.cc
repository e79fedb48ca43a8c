// SPDX-License-Identifier: Apache-2.0
#include "lockstep/ddp.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <cmath>
#include <mutex>

#include "lockstep/gradient_scaler.h"
#include "lockstep/model/parameters.h"
#include "lockstep/models.h"
#include "lockstep/periodic_average.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"
#include "lockstep/sync_batch_norm.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Course;
using testing::expect_same_course;
using testing::kBatch;
using testing::kSteps;
using testing::message_of;
using testing::part_of;

Task lenet_task(torch::ScalarType dtype) {
  Task task = classification_task<LeNet>("lenet");
  task.make_model = [dtype] {
    LeNet net;
    net->to(dtype);
    return net.ptr();
  };
  return task;
}

Batch global_batch(int step, torch::ScalarType dtype) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(1000 + step));
  return {torch::randn({kBatch, 1, 28, 28}, generator, torch::TensorOptions().dtype(torch::kFloat64)).to(dtype),
          torch::randint(0, 10, {kBatch}, generator, torch::kInt64)};
}

// Trains on `ranks` ranks and returns what rank 0 ended with; all ranks must agree to the bit.
Course train(int ranks, int steps, torch::ScalarType dtype, const StrategyOptions& options) {
  Course course;
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    const auto strategy = make_strategy(world, lenet_task(dtype), options);
    std::vector<double> losses;
    for (int step = 0; step < steps; ++step) {
      losses.push_back(strategy->forward_backward(part_of(global_batch(step, dtype), world)).mean_loss);
      strategy->update();
    }
    for (const auto& [name, tensor] : named_parameters(strategy->model())) {
      const torch::Tensor all = world.all_gather(dense_view(tensor));
      for (int rank = 1; rank < world.size(); ++rank) EXPECT_TRUE(torch::equal(all[rank], all[0])) << name;
    }
    const std::lock_guard lock(mutex);
    if (world.rank() != 0) return;
    course.losses = losses;
    for (const auto& parameter : strategy->model().parameters()) course.parameters.push_back(parameter.detach());
  });
  return course;
}

class DdpOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, DdpOfSize, ::testing::Values(2, 3, 4, 7));

TEST_P(DdpOfSize, trains_as_one_rank_does_with_sgd) {
  const StrategyOptions options{.optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true}, .seed = 4};
  expect_same_course(train(GetParam(), kSteps, torch::kFloat64, options), train(1, kSteps, torch::kFloat64, options),
                     1e-9);
}

TEST_P(DdpOfSize, trains_as_one_rank_does_with_adamw) {
  const StrategyOptions options{.optimizer = AdamWOptions{.lr = 1e-3}, .seed = 4};
  expect_same_course(train(GetParam(), kSteps, torch::kFloat64, options), train(1, kSteps, torch::kFloat64, options),
                     1e-9);
}

TEST_P(DdpOfSize, makes_one_step_as_one_rank_does_in_float32) {
  const StrategyOptions options{.optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9}, .seed = 4};
  expect_same_course(train(GetParam(), 1, torch::kFloat32, options), train(1, 1, torch::kFloat32, options), 1e-5);
}

TEST(Ddp, trains_when_a_batch_has_fewer_samples_than_ranks) {
  std::vector<torch::Tensor> weights(2);
  for (const int ranks : {1, 4}) {
    run_ranks(ranks, [&](World& world) {
      const auto strategy =
          make_strategy(world, lenet_task(torch::kFloat64), {.optimizer = SGDOptions{.lr = 0.1}, .seed = 4});
      Batch batch = global_batch(0, torch::kFloat64);
      batch = {batch.data.slice(0, 0, 2), batch.target.slice(0, 0, 2)};
      strategy->forward_backward(part_of(batch, world));
      strategy->update();
      if (world.rank() == 0) weights[ranks == 1 ? 0 : 1] = strategy->model().parameters()[0].detach();
    });
  }
  EXPECT_TRUE(torch::allclose(weights[0], weights[1], 1e-12, 1e-12));
}

TEST(Ddp, gives_every_rank_the_parameters_and_buffers_of_rank_0) {
  run_ranks(3, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    {
      const torch::NoGradGuard no_grad;
      for (auto& tensor : net->parameters()) tensor.fill_(world.rank() + 1);
      for (auto& tensor : net->buffers()) tensor.fill_(world.rank() + 1);
    }
    const DistributedDataParallel ddp(world, *net);
    for (const auto& tensor : net->parameters()) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
    for (const auto& tensor : net->buffers()) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
  });
}

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

TEST(Ddp, names_a_parameter_that_only_one_rank_has_frozen) {
  const auto freeze_on_rank_1 = [](World& world) {
    torch::nn::Linear net(3, 4);
    net->bias.set_requires_grad(world.rank() != 1);
    DistributedDataParallel(world, *net);
  };
  EXPECT_TRUE(contains(message_of<MismatchError>([&] { run_ranks(2, freeze_on_rank_1); }), "trained on rank 0, bias"));
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

TEST(Ddp, leaves_frozen_parameters_out) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
    for (auto& parameter : net->parameters()) parameter.set_requires_grad(parameter.size(0) == 1);
    DistributedDataParallel ddp(world, *net);
    ddp.backward(net->forward(torch::ones({1, 2})).sum(), 1);
    EXPECT_FALSE(net->parameters()[0].grad().defined());
    EXPECT_TRUE(net->parameters()[2].grad().defined());
  });
}

TEST(Ddp, names_the_tensor_in_which_models_differ_before_any_is_sent) {
  const auto with_odd_rank_1 = [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::Linear(4, world.rank() == 1 ? 6 : 5));
    DistributedDataParallel(world, *net);
  };
  const std::string message = message_of<MismatchError>([&] { run_ranks(3, with_odd_rank_1); });
  EXPECT_TRUE(contains(message, "rank 0 and rank 1 differ at tensor 2: 1.weight float[5, 4]"));
  EXPECT_TRUE(contains(message, "1.weight float[6, 4]"));
}

TEST(Ddp, names_a_model_that_lacks_a_parameter) {
  const auto with_small_rank_0 = [](World& world) {
    torch::nn::Linear net(torch::nn::LinearOptions(3, 4).bias(world.rank() == 1));
    DistributedDataParallel(world, *net);
  };
  EXPECT_TRUE(contains(message_of<MismatchError>([&] { run_ranks(2, with_small_rank_0); }),
                       "(no such tensor) on rank 0, bias float[4]"));
}

TEST(Ddp, refuses_an_optimizer_of_another_model) {
  torch::nn::Linear net(2, 1), other(2, 1);
  SGD sgd(other->parameters(), {.lr = 1});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { DistributedDataParallel(World::single(), *net, sgd); }),
                       "not a parameter of the module"));
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

// Two linear layers that share a weight, a frozen one, an empty one, and one in another dtype.
struct OddNetImpl : torch::nn::Module {
  OddNetImpl() {
    first = register_module("first", torch::nn::Linear(4, 4));
    tied = register_parameter("tied", first->weight);
    frozen = register_parameter("frozen", torch::full({4}, 2.0F), /*requires_grad=*/false);
    empty = register_parameter("empty", torch::empty({0, 3}));
    wide = register_parameter("wide", torch::ones({4}, torch::kFloat64));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return (torch::linear(first(x), tied) * frozen).to(torch::kFloat64) * wide;
  }
  torch::nn::Linear first{nullptr};
  torch::Tensor tied, frozen, empty, wide;
};
TORCH_MODULE(OddNet);

TEST(Ddp, keeps_one_copy_of_all_parameters_for_the_ranks_of_a_machine) {
  std::vector<const void*> places(3);
  run_ranks(3, [&](World& world) {
    OddNet net;
    SGD sgd(net->parameters(), {.lr = 0.5});
    DistributedDataParallel ddp(world, *net, sgd);
    places[world.rank()] = net->tied.const_data_ptr();
    ddp.backward(net->forward(torch::ones({2, 4})).sum(), 2);
    sgd.step();
    EXPECT_EQ(net->tied.const_data_ptr(), net->first->weight.const_data_ptr());
    EXPECT_TRUE(torch::equal(net->frozen, torch::full({4}, 2.0F)));
    EXPECT_FALSE(torch::equal(net->wide.detach(), torch::ones({4}, torch::kFloat64)));
    EXPECT_EQ(net->empty.numel(), 0);
    world.barrier();
  });
  EXPECT_EQ(places[0], places[1]);
  EXPECT_EQ(places[0], places[2]);
}

// What one rank computes on the batches of all ranks, step by step.
torch::Tensor trained_alone(const std::vector<std::vector<torch::Tensor>>& steps) {
  const torch::Tensor w = torch::ones({3}, torch::kFloat64).set_requires_grad(true);
  for (const auto& batches : steps) {
    w.mutable_grad().reset();
    (torch::cat(batches).matmul(w)).square().mean().backward();
    const torch::NoGradGuard no_grad;
    w.sub_(w.grad(), 0.01);
  }
  return w.detach();
}

torch::Tensor batch_of(int rank, int step, std::int64_t samples) {
  return torch::linspace(rank, rank + step + 1.0, 3 * samples, torch::kFloat64).view({samples, 3});
}

struct OneWeightImpl : torch::nn::Module {
  OneWeightImpl() { w = register_parameter("w", torch::ones({3}, torch::kFloat64)); }
  torch::Tensor loss(const torch::Tensor& data) { return data.matmul(w).square().mean(); }
  torch::Tensor w;
};
TORCH_MODULE(OneWeight);

TEST(Ddp, lets_ranks_run_out_of_batches_at_different_times) {
  for (const bool share : {true, false}) {
    std::vector<std::vector<torch::Tensor>> steps(4);
    for (int step = 0; step < 4; ++step)
      for (int rank = 0; rank < 3; ++rank)
        if (step < 2 + rank) steps[step].push_back(batch_of(rank, step, rank + 1));
    run_ranks(3, [&](World& world) {
      OneWeight net;
      SGD sgd(net->parameters(), {.lr = 0.01});
      DistributedDataParallel ddp(world, *net, sgd, {.share_parameters = share});
      for (int step = 0; step < std::min(4, 2 + world.rank()); ++step) {
        ddp.backward(net->loss(batch_of(world.rank(), step, world.rank() + 1)), world.rank() + 1);
        sgd.step();
        sgd.zero_grad();
      }
      ddp.join(sgd);
      EXPECT_TRUE(torch::allclose(net->w.detach(), trained_alone(steps), 1e-12, 0)) << net->w;
      world.barrier();
    });
  }
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
        for (int part = 0; part < 2; ++part) all.push_back(batch_of(rank, part, rank + 1 + part));
      {
        const auto only_add = ddp.no_sync();
        ddp.backward(net->loss(batch_of(world.rank(), 0, world.rank() + 1)) / 2, world.rank() + 1);
      }
      ddp.backward(net->loss(batch_of(world.rank(), 1, world.rank() + 2)) / 2, world.rank() + 2);
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
        ddp.backward(net->loss(batch_of(world.rank(), step, 2)), 2);
      } else {
        ddp.backward(net->loss(batch_of(world.rank(), step, 2)), 2);
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
        ddp.backward(net->loss(batch_of(world.rank(), step, 2)), 2);
        sgd.step();
        sgd.zero_grad();
      }
      EXPECT_EQ(ddp.statistics().exchanges, 3);
      EXPECT_EQ(ddp.statistics().bytes, 3 * (share ? 3 : 4) * 8) << "buckets carry a flag beside the three gradients";
      world.barrier();
    });
  }
}

TEST(Ddp, leaves_alone_what_it_is_told_to_ignore) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
    {
      const torch::NoGradGuard no_grad;
      for (torch::Tensor& p : net->parameters()) p.fill_(world.rank() + 1);
      for (torch::Tensor& b : net->buffers()) b.fill_(world.rank() + 1);
    }
    DistributedDataParallel ddp(world, *net, {.ignored = {"0.weight", "1.running_mean"}});
    EXPECT_EQ(net->named_parameters()["0.weight"][0][0].item<float>(), static_cast<float>(world.rank() + 1));
    EXPECT_EQ(net->named_parameters()["0.bias"][0].item<float>(), 1.0F);
    EXPECT_EQ(net->named_buffers()["1.running_mean"][0].item<float>(), static_cast<float>(world.rank() + 1));
    EXPECT_EQ(net->named_buffers()["1.running_var"][0].item<float>(), 1.0F);
    const torch::Tensor weight = net->named_parameters()["0.weight"], bias = net->named_parameters()["1.bias"];
    ddp.backward(weight.sum() * world.rank() + bias.sum() * world.rank() * 2, 1);
    EXPECT_EQ(weight.grad()[0][0].item<float>(), static_cast<float>(world.rank())) << "its own";
    EXPECT_EQ(bias.grad()[0].item<float>(), 1.0F) << "the mean";
  });
}

TEST(Ddp, names_what_is_ignored_and_can_not_be) {
  torch::nn::Linear net(2, 1);
  SGD sgd(net->parameters(), {.lr = 1});
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { DistributedDataParallel(World::single(), *net, sgd, {.ignored = {"weigth"}}); }),
      "no parameter or buffer weigth"));
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { DistributedDataParallel(World::single(), *net, sgd, {.ignored = {"bias"}}); }),
      "bias is ignored, but the optimizer"));
}

TEST(Ddp, halves_the_loss_scale_when_gradients_overflow_on_one_rank) {
  run_ranks(2, [](World& world) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 0.01});
    DistributedDataParallel ddp(world, *net, sgd);
    GradientScaler scaler({.initial_scale = 8, .growth_interval = 1});
    torch::Tensor loss = net->loss(batch_of(0, 0, 2));
    if (world.rank() == 1) loss = loss * std::numeric_limits<double>::infinity();
    ddp.backward(scaler.scale(loss), 2);
    EXPECT_FALSE(scaler.step(sgd));
    EXPECT_EQ(scaler.current_scale(), 4);
    EXPECT_TRUE(torch::equal(net->w.detach(), torch::ones({3}, torch::kFloat64)));
    sgd.zero_grad();
    ddp.backward(scaler.scale(net->loss(batch_of(0, 0, 2))), 2);
    EXPECT_TRUE(scaler.step(sgd));
    EXPECT_EQ(scaler.current_scale(), 8);
    EXPECT_TRUE(torch::allclose(net->w.detach(), trained_alone({{batch_of(0, 0, 2)}}), 1e-12, 0));
    world.barrier();
  });
}

TEST(Ddp, leaves_a_step_out_when_gradients_overflow_at_a_loss_scale_of_one) {
  run_ranks(2, [](World& world) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 0.01});
    DistributedDataParallel ddp(world, *net, sgd);
    GradientScaler scaler({.initial_scale = 1});
    torch::Tensor loss = net->loss(batch_of(0, 0, 2));
    if (world.rank() == 1) loss = loss * std::numeric_limits<double>::infinity();
    ddp.backward(scaler.scale(loss), 2);
    EXPECT_FALSE(scaler.step(sgd));
    EXPECT_TRUE(torch::equal(net->w.detach(), torch::ones({3}, torch::kFloat64)));
    world.barrier();
  });
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

// A gradient of a gradient, through a parameter that is used twice.
torch::Tensor penalised_loss(OneWeight& net, const torch::Tensor& data) {
  const torch::Tensor loss = net->loss(data) + net->loss(data * 0.5);
  const torch::Tensor gradient = torch::autograd::grad({loss}, {net->w}, {}, std::nullopt, /*create_graph=*/true)[0];
  return loss + gradient.square().sum() * 0.01;
}

TEST(Ddp, takes_a_parameter_used_twice_and_a_double_backward) {
  OneWeight alone;
  penalised_loss(alone, batch_of(1, 1, 2)).backward();
  const torch::Tensor expected = alone->w.detach() - 0.01 * alone->w.grad();
  run_ranks(2, [&](World& world) {
    OneWeight net;
    SGD sgd(net->parameters(), {.lr = 0.01});
    DistributedDataParallel ddp(world, *net, sgd);
    ddp.backward(penalised_loss(net, batch_of(1, 1, 2)), 2);
    sgd.step();
    EXPECT_TRUE(torch::allclose(net->w.detach(), expected, 1e-12, 0));
    world.barrier();
  });
}

TEST(Ddp, works_on_a_module_without_parameters) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net{torch::nn::Flatten()};
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel ddp(world, *net, sgd);
    const torch::Tensor input = torch::ones({2, 3}).set_requires_grad(true);
    ddp.backward(net->forward(input).sum(), 2);
    sgd.step();
    EXPECT_EQ(ddp.last_batch().samples, 4);
    EXPECT_TRUE(torch::equal(input.grad(), torch::ones({2, 3})));
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

// What breaks shared parameters is an error that names them.
template <class Break>
std::string after(Break do_break) {
  return message_of<UsageError>([&] {
    torch::nn::Linear net(2, 1);
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel ddp(World::single(), *net, sgd);
    do_break(net, ddp);
    ddp.backward(net->forward(torch::ones({1, 2}, net->weight.dtype())).sum(), 1);
    sgd.step();
  });
}

TEST(Ddp, names_a_parameter_that_was_written_by_hand) {
  const std::string message = after([](torch::nn::Linear& net, DistributedDataParallel&) {
    const torch::NoGradGuard no_grad;
    net->bias.mul_(0.5);
  });
  EXPECT_TRUE(contains(message, "parameter bias was written between two steps"));
  EXPECT_TRUE(contains(message, "share_parameters = false"));
}

TEST(Ddp, names_a_parameter_that_left_the_block) {
  const std::string message = after([](torch::nn::Linear& net, DistributedDataParallel&) { net->to(torch::kFloat64); });
  EXPECT_TRUE(contains(message, "parameter weight has left the memory"));
}

TEST(Ddp, accepts_parameters_that_every_rank_wrote_alike) {
  run_ranks(2, [](World& world) {
    torch::nn::Linear net(2, 1);
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel ddp(world, *net, sgd);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(3);
    }
    ddp.parameters_written();
    ddp.backward(net->forward(torch::ones({1, 2})).sum(), 1);
    sgd.step();
    EXPECT_TRUE(torch::equal(net->weight.detach(), torch::full({1, 2}, 2.0F)));
    world.barrier();
  });
}

TEST(Ddp, fails_a_graph_that_was_made_before_the_step) {
  torch::nn::Linear net(2, 2);
  SGD sgd(net->parameters(), {.lr = 1});
  DistributedDataParallel ddp(World::single(), *net, sgd);
  const torch::Tensor input = torch::ones({1, 2}).set_requires_grad(true);
  const torch::Tensor old = net->forward(net->forward(input)).sum();
  ddp.backward(net->forward(input).sum(), 1);
  sgd.step();
  EXPECT_ANY_THROW(old.backward());
}

}  // namespace
}  // namespace lockstep
