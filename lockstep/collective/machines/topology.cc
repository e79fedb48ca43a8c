// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/topology.h"

#include <map>

namespace lockstep {
namespace {

using shm::Part;

// The elements of one machine. Parts of consecutive ranks are one range.
std::vector<Part> ranges_of(const shm::Partition& parts, const Topology& topology, int machine) {
  std::vector<Part> ranges;
  for (const int rank : topology.ranks_on(machine)) {
    const Part part = parts[rank];
    const bool continues = !ranges.empty() && ranges.back().begin + ranges.back().count == part.begin;
    if (continues)
      ranges.back().count += part.count;
    else if (part.count > 0)
      ranges.push_back(part);
  }
  return ranges;
}

}  // namespace

int Topology::machines() const { return std::ranges::max(machine_of) + 1; }

std::vector<int> Topology::ranks_on(int machine) const {
  std::vector<int> found;
  for (int rank = 0; rank < ranks(); ++rank)
    if (machine_of[rank] == machine) found.push_back(rank);
  return found;
}

int Topology::local_rank(int rank) const {
  return to_int(std::count(machine_of.begin(), machine_of.begin() + rank, machine_of[rank]));
}

int Topology::smallest_machine() const {
  IntVector<int> sizes(machines());
  for (const int machine : machine_of) ++sizes[machine];
  return std::ranges::min(sizes);
}

Topology Topology::of_group(const std::vector<int>& ranks) const {
  std::map<int, int> numbers;  // of this world's machines in the sub-world
  Topology group;
  for (const int rank : ranks)
    group.machine_of.push_back(numbers.try_emplace(machine_of[rank], numbers.size()).first->second);
  return group;
}

std::vector<int> Topology::local_ranks(int machine, const std::vector<int>& ranks) const {
  std::vector<int> local;
  for (const int rank : ranks)
    if (machine_of[rank] == machine) local.push_back(local_rank(rank));
  return local;
}

std::vector<Pieces> rounds_of(const shm::Partition& parts, const Topology& topology, std::size_t most) {
  const Pieces none(topology.machines());
  std::vector<Pieces> rounds{none};
  for (int machine = 0; machine < topology.machines(); ++machine) {
    std::size_t round = 0;
    for (const Part& range : ranges_of(parts, topology, machine))
      for (std::size_t done = 0; done < range.count; done += most, ++round) {
        if (round == rounds.size()) rounds.push_back(none);
        rounds[round][machine] = {range.begin + done, std::min(most, range.count - done)};
      }
  }
  return rounds;
}

Part common(const Part& one, const Part& other) {
  const std::size_t begin = std::max(one.begin, other.begin);
  const std::size_t end = std::min(one.begin + one.count, other.begin + other.count);
  return {begin, end > begin ? end - begin : 0};
}

}  // namespace lockstep
