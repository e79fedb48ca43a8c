// SPDX-License-Identifier: Apache-2.0
// collective/machines/machine_collective.h: the base of the collectives that cut an array into slices: all_reduce.cc,
// broadcast.cc, and those of machine_parts.h.
//
// Slices: an array, chunk by chunk, is cut into S slices; S is at most the smallest number of ranks on one machine.
// Local rank s < S of each machine owns slice s: it alone exchanges that slice, with the owners of slice s on the other
// machines.
//
// Flow:    collectives.h -> here -> collective/shm/ inside a machine, link.h between machines
// Owns:    nothing; memory that transfers use belongs to Hierarchy, which outlives them also after an error
// Threads: one at a time
// Ranks:   all of all machines, in the same order
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/collective/call.h"
#include "lockstep/collective/machines/hierarchy.h"
#include "lockstep/collective/shm/partition.h"

namespace lockstep {

using PartCounts = IntVector<std::size_t>;

// Elements of each rank's part.
PartCounts counts_of(const Call& call, int ranks);

class MachineCollective {
 protected:
  // `slices`: S.
  MachineCollective(Hierarchy& hierarchy, const Call& call, int slices);

  int machine() const { return hierarchy_.machine; }
  int machines() const { return hierarchy_.machines; }
  int local_rank() const { return hierarchy_.inside.rank(); }
  int local_size() const { return hierarchy_.inside.size(); }
  bool alone() const { return local_size() == 1; }  // on this machine: then nothing is done inside
  bool owns_slice() const { return local_rank() < slices_; }
  MachineLink& link() const { return *hierarchy_.between; }  // of owners only

  std::size_t bytes(std::size_t elements) const { return elements * size_of(call_.dtype); }

  // The slice of `owner` in a range of elements; empty for a local rank that owns none.
  shm::Part slice_of(const shm::Part& range, int owner) const;
  shm::Part own_slice(const shm::Part& range) const { return slice_of(range, local_rank()); }

  // Owners compare the call's signature with the other machines': start to, and wait for it. Transfers may be started
  // in between, but not waited for. Throws MismatchError, PeerLost.
  void begin_check();
  void finish_check();

  // A collective inside the machine. In that of chunk 0 the machine's ranks compare the signature of the whole call:
  // what they do inside may be alike where the calls are not (a mean is a sum until the machines divide it).
  void run_inside(std::size_t chunk, const Call& call);
  void run_inside(const Call& call) { hierarchy_.inside.run(call); }

  // What is reduced inside, and on the way around a ring: a mean is divided once, at the end.
  ReduceOp op_inside() const { return call_.op == ReduceOp::kMean ? ReduceOp::kSum : call_.op; }

  // destination[i] = sources[0][i] op sources[1][i] op ...
  void reduce(std::span<const std::byte* const> sources, std::byte* destination, std::size_t count, ReduceOp op) const;

  void wait_for_transfers(ChunkBuffers& buffers) const {
    link().wait(buffers.receives);
    link().wait(buffers.sends);
  }

  ChunkBuffers& buffers_of(std::size_t chunk) { return hierarchy_.buffers[chunk % hierarchy_.buffers.size()]; }

  // At least so many bytes, where the ranks of the machine can read them.
  std::byte* grown(shm::Memory& memory, std::size_t bytes);

  Hierarchy& hierarchy_;
  const Call& call_;
  const Signature signature_;
  const int slices_;
};

}  // namespace lockstep
