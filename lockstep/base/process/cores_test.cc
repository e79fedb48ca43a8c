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

// Two packages of two NUMA nodes, each with 8 cores of two hardware threads: 0-31 are the first ones.
class LargeMachine : public ::testing::Test {
 protected:
  LargeMachine() {
    for (int cpu = 0; cpu < 64; ++cpu) {
      const int core = cpu % 32, node = core / 8;
      write(cpu, "topology/physical_package_id", concat(core / 16));
      write(cpu, "topology/core_id", concat(core % 16));
      std::filesystem::create_directories(folder_ / concat("cpu", cpu, "/node", node));
      all_.push_back(cpu);
    }
  }

  std::vector<CorePlace> places() const { return read_core_places(folder_ / ""); }
  std::string drawn(const CoreSet& cores, int ranks) const { return draw_machine(cores, ranks, folder_ / ""); }

  CoreSet all_;

 private:
  void write(int cpu, const std::string& name, const std::string& text) const {
    const std::filesystem::path file = folder_ / concat("cpu", cpu, '/', name);
    std::filesystem::create_directories(file.parent_path());
    write_file(file, text + "\n");
  }

  const testing::TempFolder folder_;
};

TEST_F(LargeMachine, is_drawn_with_the_cores_of_each_rank) {
  EXPECT_EQ(drawn(all_, 8),
            "machine: 32 cores, 64 hardware threads\n"
            "  package 0, NUMA node 0: 0-7,32-39\n    rank 0: 0-3,32-35\n    rank 1: 4-7,36-39\n"
            "  package 0, NUMA node 1: 8-15,40-47\n    rank 2: 8-11,40-43\n    rank 3: 12-15,44-47\n"
            "  package 1, NUMA node 2: 16-23,48-55\n    rank 4: 16-19,48-51\n    rank 5: 20-23,52-55\n"
            "  package 1, NUMA node 3: 24-31,56-63\n    rank 6: 24-27,56-59\n    rank 7: 28-31,60-63\n");
}

TEST_F(LargeMachine, shows_a_rank_in_each_node_where_it_has_cores) {
  EXPECT_EQ(drawn({6, 7, 8, 9, 10, 11}, 2),
            "machine: 6 cores, 6 hardware threads\n"
            "  package 0, NUMA node 0: 6-7\n    rank 0: 6-7\n"
            "  package 0, NUMA node 1: 8-11\n    rank 0: 8\n    rank 1: 9-11\n");
}

TEST_F(LargeMachine, has_several_nodes) {
  EXPECT_TRUE(has_several_nodes(places()));
  EXPECT_EQ(place_of(41, places()).node, 1);
  EXPECT_FALSE(has_several_nodes({{.package = 0, .node = 3}, {}, {.package = 0, .node = 3}}));
}

TEST_F(LargeMachine, without_the_kernels_files_has_no_places) {
  EXPECT_EQ(draw_machine({0, 1}, 0, "/nowhere"),
            "machine: 2 cores, 2 hardware threads\n  package -1, NUMA node -1: 0-1\n");
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
