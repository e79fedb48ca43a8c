// SPDX-License-Identifier: Apache-2.0
// Tests of the pages; whole programs under LOCKSTEP_CHECK: tests/train/unusual_loop_test.cc.
#include "lockstep/step/guards/guards.h"

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

// Hashes of the parts that n exchanges compare.
std::vector<double> hashes_of_parts(World& world, const std::vector<NamedTensor>& parameters, int n) {
  StepCheck check(world, 0);
  std::vector<double> hashes;
  for (int i = 0; i < n; ++i) {
    hashes.push_back(check.hash_of_part(parameters));
    check.exchanged(parameters);
  }
  return hashes;
}

int differences(const std::vector<double>& one, const std::vector<double>& other) {
  int count = 0;
  for (size_t i = 0; i < one.size(); ++i) count += one[i] != other[i] ? 1 : 0;
  return count;
}

TEST(StepCheck, sees_each_byte_once_in_a_hundred_exchanges) {
  run_ranks(2, [](World& world) {
    const std::vector<NamedTensor> parameters{
        {"a", torch::ones({77, 7})}, {"b", torch::ones({1'234'567})}, {"c", torch::ones({5})}};
    const auto before = hashes_of_parts(world, parameters, 100);
    for (const auto& [tensor, byte] :
         std::vector<std::pair<int, int>>{{0, 0}, {0, 2155}, {1, 0}, {1, 4'938'267}, {1, 987'654}, {2, 19}}) {
      auto* const bytes = static_cast<uint8_t*>(parameters[static_cast<size_t>(tensor)].tensor.mutable_data_ptr());
      bytes[byte] ^= 1;
      EXPECT_EQ(differences(before, hashes_of_parts(world, parameters, 100)), 1) << tensor << ' ' << byte;
      bytes[byte] ^= 1;
    }
  });
}

TEST(StepCheck, sees_all_bytes_of_a_small_model_at_every_exchange) {
  run_ranks(2, [](World& world) {
    const auto parameters = two_parameters();
    const auto before = hashes_of_parts(world, parameters, 3);
    parameters[1].tensor.fill_(-0.0);
    EXPECT_EQ(differences(before, hashes_of_parts(world, parameters, 3)), 3);
  });
}

}  // namespace
}  // namespace lockstep
