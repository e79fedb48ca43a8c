// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/machine_parts.h"

namespace lockstep {
namespace {

using shm::Part;

std::size_t whole_bytes(const Hierarchy& hierarchy, const Call& call) {
  return shm::Partition::of(call, hierarchy.topology.ranks()).total() * size_of(call.dtype);
}

// All pieces of a round together are a chunk.
std::size_t piece_elements(const Hierarchy& hierarchy, const Call& call) {
  const std::size_t bytes = chunk_bytes(whole_bytes(hierarchy, call)) / to_size(hierarchy.machines);
  return bytes / kCacheLine * kCacheLine / size_of(call.dtype);
}

}  // namespace

MachineParts::MachineParts(Hierarchy& hierarchy, const Call& call, std::byte* whole, std::byte* own)
    : MachineCollective(hierarchy, call, slices_for(whole_bytes(hierarchy, call), hierarchy.smallest_machine)),
      whole_(whole),
      own_(own),
      parts_(shm::Partition::of(call, hierarchy.topology.ranks())),
      rounds_(rounds_of(parts_, hierarchy.topology, piece_elements(hierarchy, call))) {}

std::vector<Part> MachineParts::slices_of(std::size_t round, int owner, int except) const {
  std::vector<Part> slices;
  for (int machine = 0; machine < machines(); ++machine)
    if (machine != except) slices.push_back(slice_of(piece(round, machine), owner));
  return slices;
}

IntVector<std::size_t> MachineParts::packed_counts(std::size_t round, int except) const {
  IntVector<std::size_t> counts(local_size());
  for (int owner = 0; owner < local_size(); ++owner)
    for (const Part& slice : slices_of(round, owner, except)) counts[owner] += slice.count;
  return counts;
}

std::size_t MachineParts::elements(std::size_t round) const {
  std::size_t sum = 0;
  for (const Part& piece : rounds_[round]) sum += piece.count;
  return sum;
}

std::vector<std::size_t> MachineParts::shares_of(const Part& range) const {
  std::vector<std::size_t> shares;
  for (const int rank : hierarchy_.ranks_here) shares.push_back(common(range, parts_[rank]).count);
  return shares;
}

std::byte* MachineParts::in_own(const Part& range) const {
  const Part mine = own_part();
  return own_ + bytes(std::clamp(range.begin, mine.begin, mine.begin + mine.count) - mine.begin);
}

}  // namespace lockstep
