// SPDX-License-Identifier: Apache-2.0
// collective/machines/machine_parts.h: the base of reduce_scatter.cc and all_gather.cc, whose arrays consist of one part
// per rank.
//
// An array goes in rounds of one piece per machine (topology.h), and every piece is cut into slices. So that one call
// inside the machine does for all pieces of a round, slices are packed by owner: those of owner 0 in all pieces, in the
// order of the machines, then those of owner 1, and so on.
//
// Flow:    reduce_scatter.cc, all_gather.cc -> here -> topology.h
// Owns:    nothing
// Threads: one at a time
// Ranks:   all ranks compute the same rounds
#pragma once

#include "lockstep/collective/machines/machine_collective.h"

namespace lockstep {

class MachineParts : protected MachineCollective {
 protected:
  // `whole`: the array of all parts. `own`: this rank's part.
  MachineParts(Hierarchy& hierarchy, const Call& call, const void* whole, const void* own)
      : MachineParts(hierarchy, call, shm::Partition::of(call, hierarchy.topology.ranks())) {
    whole_ = static_cast<std::byte*>(const_cast<void*>(whole));  // each writes to one of them only
    own_ = static_cast<std::byte*>(const_cast<void*>(own));
  }

  // Tells whether pieces go around the ring of machines: all_gather.cc.
  bool goes_around() const {
    return call_.operation == Operation::kAllGather && hierarchy_.topology.ranks() == machines() &&
           bytes(parts_.total()) >= kRingFromBytes * to_size(machines());
  }

  size_t rounds() const { return rounds_.size(); }
  const shm::Part& piece(size_t round, int machine) const { return rounds_[round][machine]; }
  shm::Part own_part() const { return parts_[hierarchy_.rank]; }

  // The slices of `owner` in the pieces of all machines but `except`, in the order of the machines.
  std::vector<shm::Part> slices_of(size_t round, int owner, int except = kNoMachine) const {
    std::vector<shm::Part> slices;
    for (int machine = 0; machine < machines(); ++machine)
      if (machine != except) slices.push_back(slice_of(piece(round, machine), owner));
    return slices;
  }

  // Counts the elements of each local rank's slices together.
  IntVector<size_t> packed_counts(size_t round, int except = kNoMachine) const {
    IntVector<size_t> counts(local_size());
    for (int owner = 0; owner < local_size(); ++owner)
      for (const shm::Part& slice : slices_of(round, owner, except)) counts[owner] += slice.count;
    return counts;
  }

  size_t elements(size_t round) const {  // of all pieces
    size_t sum = 0;
    for (const shm::Part& piece : rounds_[round]) sum += piece.count;
    return sum;
  }

  // Counts the elements of `range` that belong to the part of each rank of this machine.
  std::vector<size_t> shares_of(const shm::Part& range) const {
    std::vector<size_t> shares;
    for (const int rank : hierarchy_.ranks_here) shares.push_back(common(range, parts_[rank]).count);
    return shares;
  }

  std::byte* in_whole(const shm::Part& range) const { return whole_ + bytes(range.begin); }

  // The begin of what `range` has of this rank's part.
  std::byte* in_own(const shm::Part& range) const {
    const shm::Part mine = own_part();
    return own_ + bytes(std::clamp(range.begin, mine.begin, mine.begin + mine.count) - mine.begin);
  }

 private:
  MachineParts(Hierarchy& hierarchy, const Call& call, const shm::Partition& parts)
      : MachineCollective(hierarchy, call, slices_for(parts.total() * size_of(call.dtype), hierarchy.smallest_machine)),
        parts_(parts),
        rounds_(rounds_of(parts, hierarchy.topology, piece_elements())) {}

  // All pieces of a round together are a chunk, but for the ring.
  size_t piece_elements() const {
    if (goes_around()) return kRingPiece / bytes(1);
    return chunk_bytes(bytes(parts_.total())) / to_size(machines()) / kCacheLine * kCacheLine / bytes(1);
  }

  std::byte* whole_ = nullptr;
  std::byte* own_ = nullptr;
  shm::Partition parts_;  // of the ranks
  std::vector<Pieces> rounds_;
};

}  // namespace lockstep
