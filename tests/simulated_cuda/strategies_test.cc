// SPDX-License-Identifier: Apache-2.0
// Strategies on simulated GPUs as they may be on a machine: one that has two devices, some that don't reach each other, one
// that fails, hangs or has no memory left in the middle of a step.
#include <gtest/gtest.h>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/devices.h"
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

  std::uint64_t operators_in_a_step() const {
    const auto strategy = strategy_on_gpus(GetParam().options, kDevices);
    train_step(*strategy);
    const std::uint64_t before = counted(kFaulty).operators;
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

TEST_P(GpuStrategies, name_a_gpu_too_small_for_the_model) {
  ASSERT_EQ(simulated_cuda_fail("memory@1:2"), 0);
  const std::string message = message_of<DeviceError>([] { strategy_on_gpus(GetParam().options, kDevices); });
  EXPECT_TRUE(contains(message, "cuda:1 failed: CUDA out of memory"));
}

// The first copy of a step is that of its data.
TEST_P(GpuStrategies, name_a_gpu_to_which_no_batch_can_be_copied) {
  EXPECT_TRUE(contains(error_with<DeviceError>("copy@1:1", GetParam().options), "cuda:1 failed: CUDA error"));
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

TEST_P(GpuStrategies, name_a_gpu_that_hangs) {
  const std::string fault = concat("hang@1:", 1 + operators_in_a_step() / 4);
  StrategyOptions options = GetParam().options;
  options.timeout = std::chrono::seconds(1) * LOCKSTEP_TEST_PATIENCE;  // also of the step before the fault
  EXPECT_TRUE(contains(error_with<PeerLost>(fault, options), "device cuda:1 is not done within ")) << fault;
  const Deadline deadline = Deadline::after(std::chrono::seconds(10));
  while (Devices::left_behind() > 0 && !deadline.passed()) std::this_thread::yield();
  EXPECT_EQ(Devices::left_behind(), 0);
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
