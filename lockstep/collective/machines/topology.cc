#include "lockstep/collective/machines/topology.h"

#include <algorithm>

namespace lockstep {
namespace {

using shm::Part;

// The elements of a machine: parts of ranks in a row are one run.
std::vector<Part> runs_of(const std::vector<std::size_t>& counts, const Machines& machines, int node) {
  std::vector<Part> runs;
  std::size_t begin = 0;
  for (int rank = 0; rank < machines.ranks(); ++rank) {
    const std::size_t count = counts[static_cast<std::size_t>(rank)];
    const bool goes_on = !runs.empty() && runs.back().begin + runs.back().count == begin;
    if (machines.node_of(rank) == node && goes_on) runs.back().count += count;
    if (machines.node_of(rank) == node && !goes_on && count > 0) runs.push_back({begin, count});
    begin += count;
  }
  return runs;
}

std::vector<Part> pieces_of(const std::vector<Part>& runs, std::size_t most) {
  std::vector<Part> pieces;
  for (const Part& run : runs)
    for (std::size_t done = 0; done < run.count; done += most)
      pieces.push_back({run.begin + done, std::min(most, run.count - done)});
  return pieces;
}

}  // namespace

int Machines::count() const { return std::ranges::max(nodes) + 1; }

std::vector<int> Machines::ranks_on(int node) const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < nodes.size(); ++rank)
    if (nodes[rank] == node) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

int Machines::local_rank(int rank) const {
  return static_cast<int>(std::count(nodes.begin(), nodes.begin() + rank, nodes[static_cast<std::size_t>(rank)]));
}

int Machines::slices() const {
  std::size_t least = nodes.size();
  for (int node = 0; node < count(); ++node) least = std::min(least, ranks_on(node).size());
  return static_cast<int>(least);
}

std::vector<Pieces> rounds_of(const std::vector<std::size_t>& counts, const Machines& machines, std::size_t most) {
  const auto nodes = static_cast<std::size_t>(machines.count());
  std::vector<Pieces> rounds;
  for (std::size_t node = 0; node < nodes; ++node) {
    const std::vector<Part> pieces = pieces_of(runs_of(counts, machines, static_cast<int>(node)), most);
    if (rounds.size() < pieces.size()) rounds.resize(pieces.size(), Pieces(nodes));
    for (std::size_t round = 0; round < pieces.size(); ++round) rounds[round][node] = pieces[round];
  }
  return rounds;
}

Part common(const Part& one, const Part& other) {
  const std::size_t begin = std::max(one.begin, other.begin);
  const std::size_t end = std::min(one.begin + one.count, other.begin + other.count);
  return {begin, end > begin ? end - begin : 0};
}

}  // namespace lockstep
