// SPDX-License-Identifier: Apache-2.0
// collective/machines/machine_collective.h: the base of the collectives that cut an array into chunks and slices:
// all_reduce.cc, broadcast.cc, and those of machine_parts.h.
//
// Slices: an array, chunk by chunk, is cut into S slices; S is at most the smallest number of ranks on one machine.
// Local rank s < S of each machine owns slice s: it alone exchanges that slice, with the owners of slice s on the other
// machines.
//
// Flow:    collectives.h -> here -> collective/shm/ inside a machine, link.h between machines
// Owns:    nothing; memory that transfers use belongs to Hierarchy, which outlives them also after an error
// Threads: one at a time
// Ranks:   all of all machines, in the same order; all compute the same chunks and slices
#pragma once

#include "lockstep/collective/machines/hierarchy.h"
#include "lockstep/collective/shm/reduce_kernels.h"

namespace lockstep {

// Bytes of a chunk of a reduction: an eighth of the array, so that its steps overlap, within limits.
constexpr size_t chunk_bytes(size_t bytes) {
  constexpr size_t kSmallest = size_t{128} << 10;
  constexpr size_t kLargest = size_t{4} << 20;
  constexpr size_t kChunksWanted = 8;
  return std::clamp(bytes / kChunksWanted, kSmallest, kLargest) / kCacheLine * kCacheLine;
}

// From parts of so many bytes on a ring of machines is faster, with pieces as large as these.
constexpr size_t kRingFromBytes = size_t{64} << 10;
constexpr size_t kRingPiece = size_t{512} << 10;

// Tells whether owners send each other whole slices of a reduction. That saves a round and costs (n-1)(n-2)/n of its bytes.
inline bool is_worth_one_round(size_t bytes, int machines) {
  constexpr size_t kWorthARound = size_t{128} << 10;  // a link's bytes in 1 ms at 1 Gb/s
  return bytes * to_size(machines - 2) <= kWorthARound;
}

// Slices of `bytes` bytes. A small array is one slice: more owners would only add messages.
inline int slices_for(size_t bytes, int most) {
  constexpr size_t kWorthDividing = size_t{256} << 10;
  return bytes <= kWorthDividing ? 1 : most;
}

// An array of `count` elements in chunks of `most`; at least one chunk, which may be empty.
struct Chunks {
  size_t count;
  size_t most;

  size_t size() const { return std::max<size_t>(1, shm::chunks_of(count, most)); }
  shm::Part operator[](size_t chunk) const { return shm::Part{0, count}.chunk(chunk, most); }
};

class MachineCollective {
 protected:
  // `slices`: S.
  MachineCollective(Hierarchy& hierarchy, const Call& call, int slices)
      : hierarchy_(hierarchy), call_(call), signature_(signature_of(call)), slices_(slices) {}

  int machine() const { return hierarchy_.machine; }
  int machines() const { return hierarchy_.machines; }
  int local_rank() const { return hierarchy_.inside->rank(); }
  int local_size() const { return hierarchy_.inside->size(); }
  bool alone() const { return local_size() == 1; }  // on this machine: then nothing is done inside
  bool owns_slice() const { return local_rank() < slices_; }
  GlooLink& link() const { return *hierarchy_.between; }  // of owners only

  size_t bytes(size_t elements) const { return elements * size_of(call_.dtype); }

  // The slice of `owner` in a range of elements; empty for a local rank that owns none.
  shm::Part slice_of(const shm::Part& range, int owner) const {
    if (owner >= slices_) return {range.begin + range.count, 0};
    const shm::Part slice = shm::Partition::even(range.count, slices_, kCacheLine / bytes(1))[owner];
    return {range.begin + slice.begin, slice.count};
  }
  shm::Part own_slice(const shm::Part& range) const { return slice_of(range, local_rank()); }

  // Owners compare the call's signature with the other machines': start to, and wait for it. Transfers may be started
  // in between, but not waited for. Throws MismatchError, PeerLost.
  void begin_check() {
    if (owns_slice()) link().begin_check(signature_);
  }
  void finish_check() {
    if (owns_slice()) link().finish_check();
  }

  // A software pipeline: every stage works on every chunk, in order. In step t stage k works on chunk t - k, so that
  // what stage k started for a chunk goes on while the stages work on other chunks; stage k+1 of that chunk then waits
  // for it. Owners start the receives of a chunk in the step before, and before they send: docs/design/hierarchy.md says
  // why. So its buffers are free again for the chunk that comes one more chunk later than there are stages. The check of
  // the signatures is over before any stage but the first begins.
  template <class Receive, class... Stages>
  void run_pipeline(size_t chunks, const Receive& receive, const Stages&... stages) {
    begin_check();
    if (owns_slice()) receive(0);
    for (size_t step = 0; step < chunks + sizeof...(stages) - 1; ++step) {
      if (owns_slice() && step + 1 < chunks) receive(step + 1);
      size_t stage = 0;
      const auto take_turn = [&](const auto& work_on) {
        if (stage <= step && step - stage < chunks) work_on(step - stage);
        ++stage;
      };
      (take_turn(stages), ...);
      if (step == 0) finish_check();
    }
  }

  // A collective inside the machine. In that of chunk 0 the machine's ranks compare the signature of the whole call:
  // what they do inside may be alike where the calls are not (a mean is a sum until the machines divide it).
  void run_inside(size_t chunk, const Call& call) { hierarchy_.inside->run(call, chunk == 0 ? &signature_ : nullptr); }
  void run_inside(const Call& call) { hierarchy_.inside->run(call); }

  // The reduction inside, and on the way around a ring: a mean is divided once, at the end.
  ReduceOp op_inside() const { return call_.op == ReduceOp::kMean ? ReduceOp::kSum : call_.op; }

  // destination[i] = sources[0][i] op sources[1][i] op ...
  void reduce(std::span<const std::byte* const> sources, std::byte* destination, size_t count, ReduceOp op) const {
    shm::reduce({.sources = sources,
                 .destinations = std::span(&destination, 1),
                 .count = count,
                 .divisor = hierarchy_.topology.ranks()},
                call_.dtype, op);
  }

  void wait_for_transfers(ChunkBuffers& buffers) const {
    link().wait(buffers.receives);
    link().wait(buffers.results);
    link().wait(buffers.sends);
  }

  ChunkBuffers& buffers_of(size_t chunk) { return hierarchy_.buffers[chunk % hierarchy_.buffers.size()]; }

  // Grows `memory` to at least so many bytes, which the ranks of the machine can read.
  std::byte* grown(shm::Memory& memory, size_t bytes) {
    if (memory.size() < bytes) memory = hierarchy_.inside->allocate(bytes);
    return memory.data();
  }

  Hierarchy& hierarchy_;
  const Call& call_;
  const Signature signature_;
  const int slices_;
};

}  // namespace lockstep
