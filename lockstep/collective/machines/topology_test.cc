// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/topology.h"

#include <gtest/gtest.h>

#include <numeric>

namespace lockstep {
namespace {

using PartCounts = IntVector<size_t>;

// Every element is in one piece, of its own machine, and no piece is too long.
void expect_whole(const PartCounts& counts, const Topology& topology, size_t most) {
  std::vector<int> owner;
  for (int rank = 0; rank < counts.size(); ++rank) owner.insert(owner.end(), counts[rank], topology.machine_of[rank]);
  std::vector<int> seen(owner.size(), -1);
  for (const Pieces& round : rounds_of(shm::Partition::uneven(counts.elements()), topology, most))
    for (int machine = 0; machine < topology.machines(); ++machine) {
      const shm::Part& piece = round[machine];
      EXPECT_LE(piece.count, most);
      for (size_t at = piece.begin; at < piece.begin + piece.count; ++at) {
        EXPECT_EQ(seen[at], -1) << "an element in two pieces";
        seen[at] = machine;
      }
    }
  EXPECT_EQ(seen, owner);
}

TEST(Rounds, contain_every_element_once_with_its_machine) {
  const std::vector<Topology> layouts{{{0, 1}}, {{0, 0, 1}}, {{0, 1, 0, 1}}, {{0, 1, 1, 0, 2, 1, 0}}};
  for (const Topology& topology : layouts)
    for (const size_t most : {1, 3, 100}) {
      PartCounts growing(topology.ranks());
      std::iota(growing.begin(), growing.end(), 0);
      expect_whole(growing, topology, most);
      expect_whole(PartCounts(topology.ranks(), 5), topology, most);
      expect_whole(PartCounts(topology.ranks(), 0), topology, most);
    }
}

TEST(Rounds, merge_parts_of_consecutive_ranks) {
  const auto parts = shm::Partition::equal(5, 4);
  EXPECT_EQ(rounds_of(parts, {{0, 0, 1, 1}}, 10).size(), 1);
  EXPECT_EQ(rounds_of(parts, {{0, 1, 0, 1}}, 10).size(), 2);
}

}  // namespace
}  // namespace lockstep
