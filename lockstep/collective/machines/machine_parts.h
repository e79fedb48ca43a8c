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
  MachineParts(Hierarchy& hierarchy, const Call& call, std::byte* whole, std::byte* own);

  std::size_t rounds() const { return rounds_.size(); }
  const shm::Part& piece(std::size_t round, int machine) const { return rounds_[round][machine]; }
  shm::Part own_part() const { return parts_[hierarchy_.rank]; }

  // The slices of `owner` in the pieces of all machines but `except`, in the order of the machines.
  std::vector<shm::Part> slices_of(std::size_t round, int owner, int except = kNoMachine) const;

  // Counts the elements of each local rank's slices together.
  IntVector<std::size_t> packed_counts(std::size_t round, int except = kNoMachine) const;
  std::size_t elements(std::size_t round) const;  // of all pieces

  // Counts the elements of `range` that belong to the part of each rank of this machine.
  std::vector<std::size_t> shares_of(const shm::Part& range) const;

  std::byte* in_whole(const shm::Part& range) const { return whole_ + bytes(range.begin); }
  std::byte* in_own(const shm::Part& range) const;  // where what `range` has of this rank's part begins

 private:
  std::byte* whole_;
  std::byte* own_;
  shm::Partition parts_;  // of the ranks
  std::vector<Pieces> rounds_;
};

}  // namespace lockstep
