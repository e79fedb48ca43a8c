// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cores.h"

#include <algorithm>
#include <thread>

#include "lockstep/base/files/file.h"
#include "lockstep/base/process/core_places.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "tests/support.h"

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
    std::ranges::sort(together);
    EXPECT_EQ(together, all) << ranks;
  }
}

// Two packages of two cores of two hardware threads each, numbered as Linux does: first a thread of each core, then the
// others.
TEST(Cores, of_a_rank_are_neighbours) {
  const testing::TempFolder folder;
  for (int cpu = 0; cpu < 8; ++cpu) {
    const std::filesystem::path here = folder / concat("cpu", cpu);
    const int package = cpu % 4 / 2;
    std::filesystem::create_directories(here / "topology");
    std::filesystem::create_directories(here / concat("node", package));
    write_file(here / "topology/physical_package_id", concat(package, "\n"));
    write_file(here / "topology/core_id", concat(cpu % 2, "\n"));
  }
  const auto places = read_core_places(folder / "");
  EXPECT_EQ(neighbours_first({0, 1, 2, 3, 4, 5, 6, 7}, places), (CoreSet{0, 4, 1, 5, 2, 6, 3, 7}));
  EXPECT_EQ(neighbours_first({1, 2, 5, 9}, places), (CoreSet{9, 1, 5, 2}));  // where 9 is, is not known
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
