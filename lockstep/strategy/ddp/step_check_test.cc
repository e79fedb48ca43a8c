// SPDX-License-Identifier: Apache-2.0
// What the pages do, and whole programs under LOCKSTEP_CHECK: tests/train/unusual_loop_test.cc.
#include "lockstep/strategy/ddp/step_check.h"

#include <atomic>

#include "lockstep/error.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Fabric;

class StepCheckOver : public ::testing::TestWithParam<Fabric> {};
INSTANTIATE_TEST_SUITE_P(Fabrics, StepCheckOver,
                         ::testing::Values(Fabric::kSharedMemory, Fabric::kLonelyHosts, Fabric::kHosts),
                         [](const auto& test) { return name_of(test.param); });

std::vector<NamedTensor> two_parameters() {
  return {{"weight", torch::ones({3, 5})}, {"bias", torch::zeros({5}, torch::kBFloat16)}};
}

TEST_P(StepCheckOver, accepts_equal_parameters) {
  testing::run_over(GetParam(), 4, [](World& world) {
    StepCheck check(world, 1);
    for (int step = 0; step < 3; ++step) EXPECT_NO_THROW(check.exchanged(two_parameters()));
  });
}

// Zero and minus zero are equal numbers, but not equal bits.
TEST_P(StepCheckOver, names_the_parameter_and_the_ranks_on_every_rank_at_the_nth_exchange) {
  std::atomic<int> refused = 0;
  testing::run_over(GetParam(), 4, [&](World& world) {
    StepCheck check(world, 2);
    const auto parameters = two_parameters();
    check.exchanged(parameters);
    check.exchanged(parameters);
    if (world.rank() == 2) torch::Tensor(parameters[1].tensor)[4] = -0.0;
    check.exchanged(parameters);
    const std::string error = testing::message_of<MismatchError>([&] { check.exchanged(parameters); });
    EXPECT_TRUE(contains(error, "parameter bias is not the same on ranks 0, 1, 3 and on ranks 2, after 4 exchanges"));
    ++refused;
  });
  EXPECT_EQ(refused, 4);
}

}  // namespace
}  // namespace lockstep
