// collective/machines/topology.h: which rank is on which machine, and what of an array lies with which machine.
//
// Threads: values
// Ranks:   all ranks compute the same
#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/collective/shm/partition.h"

namespace lockstep {

// Who is where.
struct Machines {
  std::vector<int> nodes;  // of each rank: its machine, 0, 1, ...

  int count() const;
  int ranks() const { return static_cast<int>(nodes.size()); }
  int node_of(int rank) const { return nodes[static_cast<std::size_t>(rank)]; }
  std::vector<int> ranks_on(int node) const;
  int local_rank(int rank) const;
  int slices() const;  // the smallest number of ranks on one machine
};

// An array that consists of one part per rank, in rank order, cut into rounds. A round has one piece for each
// machine: some elements in a row, of parts of that machine's ranks only; none where a machine has less than others.
// So in each round as much travels to (or from) every machine, and all links are used at once.
using Pieces = std::vector<shm::Part>;

// `counts`: of each rank's part. `most`: elements of a piece.
std::vector<Pieces> rounds_of(const std::vector<std::size_t>& counts, const Machines& machines, std::size_t most);

// What two ranges have in common; an empty one begins where it would.
shm::Part common(const shm::Part& one, const shm::Part& other);

}  // namespace lockstep
