// SPDX-License-Identifier: Apache-2.0
#include "tests/lossless.h"

namespace lockstep {
namespace {

using testing::Courses;

class LosslessOptions : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LosslessOptions, ::testing::Values(2, 3, 4, 7));

TEST_P(LosslessOptions, train_as_one_rank_does) {
  World alone = World::single();
  Courses many;
  run_ranks(GetParam(), [&](World& world) {
    Courses mine = testing::lossless_courses(world);
    if (world.rank() == 0) many = std::move(mine);
  });
  testing::expect_same_courses(many, testing::lossless_courses(alone));
}

}  // namespace
}  // namespace lockstep
