// SPDX-License-Identifier: Apache-2.0
// collective/machines/topology.h: which rank is on which machine, and how an array with one part per rank is cut into
// pieces that travel between machines.
//
// Threads: values
// Ranks:   all ranks compute the same
#pragma once

#include "lockstep/base/int_vector.h"
#include "lockstep/collective/shm/partition.h"

namespace lockstep {

inline constexpr int kNoMachine = -1;

struct Topology {
  IntVector<int> machine_of;  // the machine of each rank; machines are numbered 0, 1, ... by their first rank

  int ranks() const { return machine_of.size(); }
  int machines() const;
  std::vector<int> ranks_on(int machine) const;
  int local_rank(int rank) const;  // its place among the ranks of its machine
  int smallest_machine() const;    // the smallest number of ranks on one machine

  // The topology of a sub-world of `ranks`.
  Topology of_group(const std::vector<int>& ranks) const;

  // The local ranks of those of `ranks` that are on `machine`.
  std::vector<int> local_ranks(int machine, const std::vector<int>& ranks) const;
};

// One round of a collective whose array has one part per rank, in rank order: pieces[m] is a range of elements that
// belong to ranks of machine m; empty where machine m has fewer pieces than others. So in each round about as much
// travels to (or from) every machine, and all links are used at once.
using Pieces = IntVector<shm::Part>;

// Rounds that together have every element exactly once; at least one round. `parts`: each rank's. `most`: elements of a
// piece.
std::vector<Pieces> rounds_of(const shm::Partition& parts, const Topology& topology, std::size_t most);

// The intersection of two ranges. An empty one begins where it would.
shm::Part common(const shm::Part& one, const shm::Part& other);

}  // namespace lockstep
