// SPDX-License-Identifier: Apache-2.0
// Strategies on simulated GPUs as they may be on a machine: one that has two devices, some that don't reach each other, one
// that fails, hangs or has no memory left in the middle of a step.
#include <gtest/gtest.h>

#include <functional>

#include "lockstep/activation_checkpoint.h"
#include "lockstep/base/text.h"
#include "lockstep/ddp.h"
#include "lockstep/deadline.h"
#include "lockstep/devices.h"
#include "lockstep/kvstore.h"
#include "lockstep/strategy/pipeline/stage.h"
#include "tests/shm/support.h"
#include "tests/simulated_cuda/gpu_strategies.h"

namespace lockstep {
namespace {

using namespace testing;

class GpuStrategies : public ::testing::TestWithParam<GpuArrangement> {
 protected:
  static constexpr int kDevices = 3, kFaulty = 1;

  void TearDown() override { simulated_cuda_recover(); }

  // Plain SGD: `averaging` keeps momentum by device.
  static StrategyOptions plain() {
    StrategyOptions options = GetParam().options;
    options.optimizer = SGDOptions{.lr = 0.1};
    return options;
  }

  static void expect_trains_as_a_core_does(const std::vector<int>& gpus) {
    StrategyOptions options = plain();
    options.devices = static_cast<int>(gpus.size());
    for (const int each : gpus) options.places.push_back({.device = gpu(each)});
    const auto strategy = make_strategy(World::single(), small_task(), options);
    expect_same_course(course_of(*strategy), on_one_device(small_task(), plain()));
  }

  uint64_t operators_in_a_step() const {
    const auto strategy = strategy_on_gpus(GetParam().options, kDevices);
    train_step(*strategy);
    const uint64_t before = counted(kFaulty).operators;
    train_step(*strategy);
    return counted(kFaulty).operators - before;
  }

  template <class E>
  std::string error_with(const std::string& fault, const StrategyOptions& options) const {
    const auto strategy = strategy_on_gpus(options, kDevices);
    train_step(*strategy);
    EXPECT_EQ(simulated_cuda_fail(fault.c_str()), 0);
    const std::string message = message_of<E>([&] { train_step(*strategy); });
    simulated_cuda_recover();
    return message;
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, GpuStrategies, ::testing::ValuesIn(arrangements_in_one_process()),
                         [](const auto& test) { return test.param.name; });

TEST_P(GpuStrategies, train_on_one_gpu_that_is_named_twice) { expect_trains_as_a_core_does({2, 2}); }

TEST_P(GpuStrategies, train_on_gpus_that_do_not_reach_each_other) {
  simulated_cuda_peer_access(0, 3, 0), simulated_cuda_peer_access(3, 0, 0);
  expect_trains_as_a_core_does({3, 0});
  simulated_cuda_peer_access(0, 3, 1), simulated_cuda_peer_access(3, 0, 1);
}

// 0 and 1, and 2 and 3, copy over the host; the other pairs do not.
TEST_P(GpuStrategies, train_on_gpus_some_pairs_of_which_do_not_reach_each_other) {
  const auto let_reach = [](int allowed) {
    for (const int each : {0, 2})
      simulated_cuda_peer_access(each, each + 1, allowed), simulated_cuda_peer_access(each + 1, each, allowed);
  };
  let_reach(0);
  expect_trains_as_a_core_does({0, 1, 2, 3});
  let_reach(1);
}

// A pipeline makes its stages with the first batch.
TEST_P(GpuStrategies, name_a_gpu_too_small_for_the_model) {
  ASSERT_EQ(simulated_cuda_fail("memory@1:1"), 0);
  const std::string message =
      message_of<DeviceError>([] { train_step(*strategy_on_gpus(GetParam().options, kDevices)); });
  EXPECT_TRUE(contains(message, "cuda:1 failed: CUDA out of memory"));
}

// The first copy of a step is that of its data; to the second stage of a pipeline, of what the first made of it.
TEST_P(GpuStrategies, name_a_gpu_to_which_no_batch_can_be_copied) {
  const std::string message = error_with<DeviceError>("copy@1:1", GetParam().options);
  EXPECT_TRUE(contains(message, "DeviceError: cuda:1 ") && contains(message, "failed: CUDA error")) << message;
}

TEST_P(GpuStrategies, name_a_gpu_that_fails) {
  const auto operators = operators_in_a_step();
  for (const int quarter : {0, 1, 2, 3}) {
    const std::string fault = concat("operator@1:", 1 + operators * quarter / 4);
    EXPECT_TRUE(contains(error_with<DeviceError>(fault, GetParam().options), "cuda:1 failed: CUDA error")) << fault;
  }
}

TEST_P(GpuStrategies, name_a_gpu_without_memory) {
  const auto operators = operators_in_a_step();
  for (const int quarter : {0, 1, 2}) {
    const std::string fault = concat("memory@1:", 1 + operators * quarter / 6);
    EXPECT_TRUE(contains(error_with<DeviceError>(fault, GetParam().options), "cuda:1 failed: CUDA out of memory"))
        << fault;
  }
}

// In a pipeline perhaps the GPU of another stage, which waits for that one.
TEST_P(GpuStrategies, name_a_gpu_that_hangs) {
  const std::string device = GetParam().name == "pipeline" ? "device cuda:" : "device cuda:1";
  const std::string fault = concat("hang@1:", 1 + operators_in_a_step() / 4);
  StrategyOptions options = GetParam().options;
  options.timeout = std::chrono::seconds(1) * LOCKSTEP_TEST_PATIENCE;  // also of the step before the fault
  const std::string message = error_with<PeerLost>(fault, options);
  EXPECT_TRUE(contains(message, device) && contains(message, " is not done within ")) << fault << message;
  const Deadline deadline = Deadline::after(std::chrono::seconds(10));
  while (Devices::left_behind() > 0 && !deadline.passed()) std::this_thread::yield();
  EXPECT_EQ(Devices::left_behind(), 0);
}

// What a program may put on a wrong GPU. Each is refused with the GPU where it is and the one where it has to be.
struct Misplaced {
  std::string name;
  std::string message;
  std::function<void()> use;
};
void PrintTo(const Misplaced& misplaced, std::ostream* out) { *out << misplaced.name; }

Batch batch_on(int data, int target) { return {even_batch().data.to(gpu(data)), even_batch().target.to(gpu(target))}; }

void train_alone(const Batch& batch) {
  const auto strategy = make_strategy(World::single({.device = torch::kCUDA}), even_task(),
                                      {.kind = StrategyKind::kSingle, .optimizer = SGDOptions{.lr = 0.1}});
  strategy->forward_backward(batch);
}

void be_a_stage(const Batch& batch) { run_stage(even_task(), {.micro_batches = {batch}, .device = gpu(0)}, {}); }

void give_to_store(int other) {
  Devices devices({.count = 2, .places = even_places(torch::kCUDA, 2)});
  StrategyOptions options{.kvstore = {.kind = KVStoreKind::kLocalUpdateCpu}};
  const auto store = KVStore::create(World::single(), options, &devices);
  store->init({{"w", torch::ones({4}, gpu(0))}});
  store->push({"w"}, {{torch::ones({4}, gpu(0))}, {torch::ones({4}, gpu(other))}});
}

void update_on_two_gpus() {
  const torch::Tensor zero = torch::ones({4}, gpu(0)), one = torch::ones({4}, gpu(1));
  SGD({zero, one}, {.lr = 0.1}).step();
}

void replicate_a_model_elsewhere() {
  const auto model = even_task().make_model();
  model->to(gpu(1));
  const DistributedDataParallel ddp(World::single({.device = torch::kCUDA}), *model);
}

void add_up_on_one_gpu() {
  Devices devices({.count = 2, .places = even_places(torch::kCUDA, 2)});
  devices.run([tensor = torch::ones({4}, gpu(0))](Device& device) { device.all_reduce(tensor); });
}

class MisplacedOnGpus : public ::testing::TestWithParam<Misplaced> {};
INSTANTIATE_TEST_SUITE_P(
    Tensors, MisplacedOnGpus,
    ::testing::Values(
        Misplaced{"data", "the batch is on cuda:1, but cuda:0", [] { train_alone(batch_on(1, 0)); }},
        Misplaced{"target", "the target is on cuda:1, but cuda:0", [] { train_alone(batch_on(0, 1)); }},
        Misplaced{"data_of_a_stage", "the batch is on cuda:1, but cuda:0", [] { be_a_stage(batch_on(1, 0)); }},
        Misplaced{"target_of_a_stage", "the target is on cuda:1, but cuda:0", [] { be_a_stage(batch_on(0, 1)); }},
        Misplaced{"model", "is on cuda:1, but cuda:0", replicate_a_model_elsewhere},
        Misplaced{"parameter", "a parameter of the optimizer is on cuda:1, but cuda:0", update_on_two_gpus},
        Misplaced{"pushed", "the tensor of w for the store is on cuda:2, but cuda:1", [] { give_to_store(2); }},
        Misplaced{"of_a_neighbour", "cuda:1 is on cuda:0, but cuda:1", add_up_on_one_gpu}),
    [](const auto& test) { return test.param.name; });

TEST_P(MisplacedOnGpus, are_refused_with_both_gpus_named) {
  EXPECT_TRUE(contains(message_of<DeviceError>(GetParam().use), GetParam().message));
}

// A part of forward that is computed again on the thread of autograd that the GPU has.
TEST(CheckpointOnAGpu, changes_no_gradient) {
  const auto gradients = [](bool recompute) {
    torch::manual_seed(3);
    torch::nn::Linear first(kWidth, kWidth), second(kWidth, kWidth);
    first->to(gpu(1)), second->to(gpu(1));
    const auto both = [&](const torch::Tensor& x) { return second(first(x).tanh()); };
    const torch::Tensor data = torch::ones({kSamples, kWidth}, gpu(1)).requires_grad_();
    (recompute ? checkpoint(both, data) : both(data)).square().sum().backward();
    return std::vector{data.grad().cpu(), first->weight.grad().cpu(), second->weight.grad().cpu()};
  };
  const auto plain = gradients(false), again = gradients(true);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(again[i], plain[i])) << i;
}

// A rank that trains on a GPU alone: nobody else waits for it.
TEST(GpuOfARank, that_hangs_is_named_at_the_deadline) {
  const World world = World::single({.device = torch::kCUDA, .timeout = std::chrono::seconds(1)});
  EXPECT_EQ(world.device(), gpu(0));
  const auto strategy =
      make_strategy(world, even_task(), {.kind = StrategyKind::kSingle, .optimizer = SGDOptions{.lr = 0.1}});
  const Batch batch{even_batch().data.to(gpu(0)), even_batch().target.to(gpu(0))};
  train_step(*strategy, batch);
  ASSERT_EQ(simulated_cuda_fail("hang@0:3"), 0);
  const std::string message = message_of<DeviceError>([&] { train_step(*strategy, batch); });
  simulated_cuda_recover();
  EXPECT_TRUE(contains(message, "cuda:0 is not done within 750.0 ms")) << message;
}

}  // namespace
}  // namespace lockstep
