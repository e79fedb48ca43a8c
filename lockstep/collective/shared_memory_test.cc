// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shared_memory.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "tests/worlds.h"

namespace lockstep {
namespace {

// Memory that is used for the second time is zeroed, too, and what a rank writes afterwards stays.
TEST(SharedMemory, that_is_placed_by_shares_is_zeroed_and_common) {
  testing::run_over(testing::Fabric::kSharedMemory, 3, [](World& world) {
    const auto memory = SharedMemory::of(world);
    for (const size_t bytes : {size_t{100}, size_t{100'000}, size_t{100'000}, size_t{3'000'000}}) {
      const auto block = memory->allocate_common(bytes, /*by_shares=*/true);
      ASSERT_TRUE(std::all_of(block.get(), block.get() + bytes, [](std::byte each) { return each == std::byte{0}; }));
      memory->barrier();
      if (world.rank() == 1) std::fill_n(block.get(), bytes, std::byte{5});
      memory->barrier();
      EXPECT_EQ(block.get()[0], std::byte{5});
      EXPECT_EQ(block.get()[bytes - 1], std::byte{5});
      memory->barrier();
    }
  });
}

// Containers may show ranks different machines.
TEST(SharedMemory, is_placed_as_rank_0_wants_it) {
  testing::run_over(testing::Fabric::kSharedMemory, 3, [](World& world) {
    const auto memory = SharedMemory::of(world);
    for (const bool by_shares : {true, false}) {
      const auto block = memory->allocate_common(100'000, (world.rank() == 0) == by_shares);
      const auto next = memory->allocate_common(sizeof(int), false);
      EXPECT_EQ(next.get()[0], std::byte{0});
    }
    memory->barrier();
  });
}

}  // namespace
}  // namespace lockstep
