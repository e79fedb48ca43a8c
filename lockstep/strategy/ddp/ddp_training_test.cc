// SPDX-License-Identifier: Apache-2.0
// N ranks train as one rank does, through the strategy.
#include <mutex>

#include "lockstep/collective/world/world_state.h"
#include "lockstep/ddp.h"
#include "lockstep/model/parameters.h"
#include "lockstep/models.h"
#include "lockstep/optimizers.h"
#include "lockstep/strategy.h"
#include "tests/backend_groups.h"
#include "tests/strategies.h"
#include "tests/support.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using testing::Course;
using testing::expect_same_course;
using testing::kBatch;
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
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 + step));
  return {torch::randn({kBatch, 1, 28, 28}, generator, torch::TensorOptions().dtype(torch::kFloat64)).to(dtype),
          torch::randint(0, 10, {kBatch}, generator, torch::kInt64)};
}

// Several ranks have a GPU each if the devices of the tests are GPUs; one rank trains on cores.
void run_on_devices(int ranks, const std::function<void(World&)>& body) {
  if (ranks == 1 || !testing::on_gpus()) return run_ranks(ranks, body);
  testing::backend::run_threads(ranks, [&](int rank, const testing::backend::StorePtr& store) {
    World world = WorldState::over_store(store, rank, ranks, {.device = torch::kCUDA});
    EXPECT_EQ(world.device(), torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(rank)));
    body(world);
    world.barrier();
  });
}

Batch on_device(const Batch& batch, const World& world) {
  return {batch.data.to(world.device()), batch.target.to(world.device())};
}

// Trains on `ranks` ranks and returns what rank 0 ended with; all ranks must agree to the bit.
Course train(int ranks, int steps, torch::ScalarType dtype, const StrategyOptions& options) {
  Course course;
  std::mutex mutex;
  run_on_devices(ranks, [&](World& world) {
    const auto strategy = make_strategy(world, lenet_task(dtype), options);
    std::vector<double> losses;
    for (int step = 0; step < steps; ++step) {
      losses.push_back(
          strategy->forward_backward(on_device(part_of(global_batch(step, dtype), world), world)).mean_loss);
      strategy->update();
    }
    for (const auto& [name, tensor] : named_parameters(strategy->model())) {
      const torch::Tensor all = world.all_gather(dense_view(tensor));
      for (int rank = 1; rank < world.size(); ++rank) EXPECT_TRUE(torch::equal(all[rank], all[0])) << name;
    }
    const std::lock_guard lock(mutex);
    if (world.rank() != 0) return;
    course.losses = losses;
    for (const auto& parameter : strategy->model().parameters()) course.parameters.push_back(parameter.detach().cpu());
  });
  return course;
}

class DdpOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, DdpOfSize, ::testing::Values(2, 3, 4, 7));

TEST_P(DdpOfSize, trains_as_one_rank_does_with_sgd) {
  const StrategyOptions options{.optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true}, .seed = 4};
  expect_same_course(train(GetParam(), testing::kSteps, torch::kFloat64, options),
                     train(1, testing::kSteps, torch::kFloat64, options), 1e-9);
}

TEST_P(DdpOfSize, trains_as_one_rank_does_with_adamw) {
  const StrategyOptions options{.optimizer = AdamWOptions{.lr = 1e-3}, .seed = 4};
  expect_same_course(train(GetParam(), testing::kSteps, torch::kFloat64, options),
                     train(1, testing::kSteps, torch::kFloat64, options), 1e-9);
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

// Whose layers get their gradients in another order than that in which they are registered.
struct BackwardsImpl : torch::nn::Module {
  BackwardsImpl() {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& each : parameters()) each.copy_(torch::arange(each.numel()).sin().view_as(each));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last->forward(first->forward(x).tanh()); }
  torch::nn::Linear last = register_module("last", torch::nn::Linear(256, 256));
  torch::nn::Linear first = register_module("first", torch::nn::Linear(256, 256));
};
TORCH_MODULE(Backwards);

// In the first exchange gradients lie in their bucket in another order than later.
TEST(Ddp, that_starts_again_between_three_machines_has_the_same_bits_but_around_the_ring) {
  testing::run_over_machines(testing::lonely(3), [](World& world) {
    const auto train = [&](Backwards& net, int from, int to, Algorithm algorithm) {
      SGD optimizer(net->parameters(), {.lr = 0.1});
      DistributedDataParallel ddp(world, *net, optimizer, {.algorithm = algorithm});
      for (int step = from; step < to; ++step) {
        const torch::Tensor data = torch::arange(8 * 256).view({8, 256}).mul(step * 3 + world.rank() + 1.0).sin();
        ddp.backward(net->forward(data).square().mean(), 8);
        optimizer.step();
        optimizer.zero_grad();
      }
    };
    for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing}) {
      Backwards whole, again;
      train(whole, 0, 4, algorithm);
      train(again, 0, 2, algorithm);
      train(again, 2, 4, algorithm);
      EXPECT_EQ(torch::equal(whole->last->weight, again->last->weight), algorithm == Algorithm::kDirect);
    }
  });
}

}  // namespace
}  // namespace lockstep
