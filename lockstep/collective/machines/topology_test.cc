#include "lockstep/collective/machines/topology.h"

#include <gtest/gtest.h>

#include <numeric>

namespace lockstep {
namespace {

using Counts = std::vector<std::size_t>;

// Every element is in one piece, of its own machine, and no piece is too long.
void expect_whole(const Counts& counts, const Machines& machines, std::size_t most) {
  std::vector<int> owner;
  for (std::size_t rank = 0; rank < counts.size(); ++rank)
    owner.insert(owner.end(), counts[rank], machines.nodes[rank]);
  std::vector<int> seen(owner.size(), -1);
  for (const Pieces& round : rounds_of(counts, machines, most))
    for (int node = 0; node < machines.count(); ++node) {
      const shm::Part& piece = round[static_cast<std::size_t>(node)];
      EXPECT_LE(piece.count, most);
      for (std::size_t at = piece.begin; at < piece.begin + piece.count; ++at) {
        EXPECT_EQ(seen[at], -1) << "an element in two pieces";
        seen[at] = node;
      }
    }
  EXPECT_EQ(seen, owner);
}

TEST(Rounds, have_every_element_once_with_its_machine) {
  const std::vector<Machines> layouts{{{0, 1}}, {{0, 0, 1}}, {{0, 1, 0, 1}}, {{0, 1, 1, 0, 2, 1, 0}}};
  for (const Machines& machines : layouts)
    for (const std::size_t most : {1, 3, 100}) {
      Counts growing(machines.nodes.size());
      std::iota(growing.begin(), growing.end(), 0);
      expect_whole(growing, machines, most);
      expect_whole(Counts(machines.nodes.size(), 5), machines, most);
      expect_whole(Counts(machines.nodes.size(), 0), machines, most);
    }
}

TEST(Rounds, take_ranks_in_a_row_together) {
  EXPECT_EQ(rounds_of({5, 5, 5, 5}, {{0, 0, 1, 1}}, 10).size(), 1);
  EXPECT_EQ(rounds_of({5, 5, 5, 5}, {{0, 1, 0, 1}}, 10).size(), 2);
}

}  // namespace
}  // namespace lockstep
