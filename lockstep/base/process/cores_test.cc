// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

TEST(Cores, are_divided_among_ranks_evenly_and_completely) {
  const CoreSet all = {0, 1, 2, 5, 6, 9, 12};
  for (const int ranks : {1, 2, 3, 4, 7}) {
    CoreSet together;
    for (int rank = 0; rank < ranks; ++rank) {
      const CoreSet mine = cores_of_rank(all, rank, ranks);
      EXPECT_GE(mine.size(), all.size() / to_size(ranks));
      EXPECT_LE(mine.size(), all.size() / to_size(ranks) + 1);
      together.insert(together.end(), mine.begin(), mine.end());
    }
    EXPECT_EQ(together, all) << ranks;
  }
}

TEST(Cores, are_shared_round_robin_by_more_ranks_than_cores) {
  EXPECT_EQ(cores_of_rank({3, 4}, 0, 7), CoreSet{3});
  EXPECT_EQ(cores_of_rank({3, 4}, 5, 7), CoreSet{4});
}

TEST(Cores, are_written_as_ranges) {
  EXPECT_EQ(to_string(CoreSet{}), "");
  EXPECT_EQ(to_string(CoreSet{0, 1, 2, 5}), "0-2,5");
  EXPECT_EQ(to_string(CoreSet{7}), "7");
}

TEST(Cores, pinning_moves_only_this_thread) {
  const CoreSet all = usable_cores();
  ASSERT_FALSE(all.empty());
  CoreSet pinned;
  std::thread([&] {
    pin_this_thread({all.back()});
    pinned = usable_cores();
  }).join();
  EXPECT_EQ(pinned, CoreSet{all.back()});
  EXPECT_EQ(usable_cores(), all);
  EXPECT_THROW(pin_this_thread({}), SystemError);
}

}  // namespace
}  // namespace lockstep
