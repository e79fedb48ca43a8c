// SPDX-License-Identifier: Apache-2.0
// collective/machines/topology.h: which rank is on which machine, and how an array with one part per rank is cut into
// pieces that travel between machines.
//
// Threads: values
// Ranks:   all ranks compute the same
#pragma once

#include <map>

#include "lockstep/base/int_vector.h"
#include "lockstep/collective/shm/partition.h"

namespace lockstep {

inline constexpr int kNoMachine = -1;

// {"b", "a", "b"} -> {0, 1, 0}
template <class Name>
std::vector<int> number_by_first_appearance(const std::vector<Name>& names) {
  std::map<Name, int> known;
  std::vector<int> numbers;
  for (const Name& name : names) numbers.push_back(known.try_emplace(name, to_int(known.size())).first->second);
  return numbers;
}

struct Topology {
  IntVector<int> machine_of;  // the machine of each rank; machines are numbered 0, 1, ... by their first rank

  int ranks() const { return machine_of.size(); }
  int machines() const { return std::ranges::max(machine_of) + 1; }

  std::vector<int> ranks_on(int machine) const {
    std::vector<int> found;
    for (int rank = 0; rank < ranks(); ++rank)
      if (machine_of[rank] == machine) found.push_back(rank);
    return found;
  }

  int local_rank(int rank) const {  // its place among the ranks of its machine
    return to_int(std::count(machine_of.begin(), machine_of.begin() + rank, machine_of[rank]));
  }

  int smallest_machine() const {  // the smallest number of ranks on one machine
    IntVector<int> sizes(machines());
    for (const int machine : machine_of) ++sizes[machine];
    return std::ranges::min(sizes);
  }

  // The topology of a sub-world of `ranks`.
  Topology of_group(const std::vector<int>& ranks) const {
    std::vector<int> machines;
    for (const int rank : ranks) machines.push_back(machine_of[rank]);
    return {number_by_first_appearance(machines)};
  }

  // The local ranks of those of `ranks` that are on `machine`.
  std::vector<int> local_ranks(int machine, const std::vector<int>& ranks) const {
    std::vector<int> local;
    for (const int rank : ranks)
      if (machine_of[rank] == machine) local.push_back(local_rank(rank));
    return local;
  }

  // The elements of one machine. Parts of consecutive ranks are one range.
  std::vector<shm::Part> ranges_of(const shm::Partition& parts, int machine) const {
    std::vector<shm::Part> ranges;
    for (const int rank : ranks_on(machine)) {
      const shm::Part part = parts[rank];
      const bool continues = !ranges.empty() && ranges.back().begin + ranges.back().count == part.begin;
      if (continues)
        ranges.back().count += part.count;
      else if (part.count > 0)
        ranges.push_back(part);
    }
    return ranges;
  }
};

// One round of a collective whose array has one part per rank, in rank order: pieces[m] is a range of elements that
// belong to ranks of machine m; empty where machine m has fewer pieces than others. So in each round about as much
// travels to (or from) every machine, and all links are used at once.
using Pieces = IntVector<shm::Part>;

// Rounds that together have every element exactly once; at least one round. `parts`: each rank's. `most`: elements of a
// piece.
inline std::vector<Pieces> rounds_of(const shm::Partition& parts, const Topology& topology, size_t most) {
  const Pieces none(topology.machines());
  std::vector<Pieces> rounds{none};
  for (int machine = 0; machine < topology.machines(); ++machine) {
    size_t round = 0;
    for (const shm::Part& range : topology.ranges_of(parts, machine))
      for (size_t done = 0; done < range.count; done += most, ++round) {
        if (round == rounds.size()) rounds.push_back(none);
        rounds[round][machine] = {range.begin + done, std::min(most, range.count - done)};
      }
  }
  return rounds;
}

// The intersection of two ranges. An empty one begins where it would.
inline shm::Part common(const shm::Part& one, const shm::Part& other) {
  const size_t begin = std::max(one.begin, other.begin);
  const size_t end = std::min(one.begin + one.count, other.begin + other.count);
  return {begin, end > begin ? end - begin : 0};
}

}  // namespace lockstep
