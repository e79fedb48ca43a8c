// SPDX-License-Identifier: Apache-2.0
// reduce_scatter between machines.
//
// Notation: n machines, S slices (machine_collective.h), K bytes: the parts of all ranks together. For each round of
// pieces (machine_parts.h):
//
//   1   inside    reduce_scatter of the pieces of all machines: the owner of slice s gets this machine's sum of slice s
//                 of every piece
//   2   between   the owner sends each machine its slice of that machine's piece; it receives its slice of this
//                 machine's piece from all others and reduces the n arrays in the order of the machines
//   3   inside    all_to_all: every rank gets the elements of this machine's piece that belong to its part
//
// (n-1)/n * K leave each machine, in one network round. Invariant: every element is reduced by one rank, so its bits are
// the same in every run.
#include "lockstep/collective/machines/collectives.h"
#include "lockstep/collective/machines/machine_parts.h"

namespace lockstep {
namespace {

using shm::Part;

class MachineReduceScatter : private MachineParts {
 public:
  MachineReduceScatter(Hierarchy& hierarchy, const Call& call)
      : MachineParts(hierarchy, call, call.input, call.output) {}

  // While round c is in steps 1 and 2, what c-1 sent is waited for, reduced and delivered.
  void run() {
    run_pipeline(
        rounds(), [this](size_t round) { receive_sums(round); },
        [this](size_t round) {
          reduce_inside(round);
          if (owns_slice()) send_to_owners(round);
        },
        [this](size_t round) {
          if (owns_slice()) reduce_between(round);
          if (!alone()) deliver_inside(round);
        });
  }

 private:
  // Step 1. A rank that is alone on its machine sends the pieces from where they are.
  void reduce_inside(size_t round) {
    ChunkBuffers& buffers = buffers_of(round);
    buffers.slices.resize(machines());
    if (alone()) {
      for (int machine = 0; machine < machines(); ++machine) buffers.slices[machine] = in_whole(piece(round, machine));
      return;
    }
    const IntVector<size_t> counts = packed_counts(round);
    std::byte* slice = grown(buffers.slice_memory, bytes(counts[local_rank()]));
    run_inside(round, {.operation = Operation::kReduceScatter,
                       .input = pack(round),
                       .output = slice,
                       .counts = counts.elements(),
                       .dtype = call_.dtype,
                       .op = op_inside()});
    for (int machine = 0; machine < machines(); ++machine)
      buffers.slices[machine] = std::exchange(slice, slice + bytes(own_slice(piece(round, machine)).count));
  }

  const std::byte* pack(size_t round) {
    std::byte* const packed = grown(buffers_of(round).packed_memory, bytes(elements(round)));
    std::byte* end = packed;
    for (int owner = 0; owner < slices_; ++owner)
      for (const Part& slice : slices_of(round, owner)) {
        if (slice.count > 0) std::memcpy(end, in_whole(slice), bytes(slice.count));  // else there may be no input
        end += bytes(slice.count);
      }
    return packed;
  }

  // Step 2, its messages. sources[m] is where machine m's sum arrives; the own machine's is in the slice.
  void receive_sums(size_t round) {
    ChunkBuffers& buffers = buffers_of(round);
    const size_t own_bytes = bytes(own_slice(piece(round, machine())).count);
    std::byte* arriving = grown(buffers.received_memory, own_bytes * link().peers().size());
    buffers.sources.resize(machines());
    for (const int peer : link().peers()) {
      link().receive(peer, arriving, own_bytes, buffers.receives);
      buffers.sources[peer] = std::exchange(arriving, arriving + own_bytes);
    }
  }

  void send_to_owners(size_t round) {
    ChunkBuffers& buffers = buffers_of(round);
    buffers.sources[machine()] = buffers.slices[machine()];
    for (const int peer : link().peers())
      link().send(peer, buffers.slices[peer], bytes(own_slice(piece(round, peer)).count), buffers.sends);
  }

  // Step 2, its sum. A rank that is alone reduces into its output, others into the slice, for step 3.
  void reduce_between(size_t round) {
    ChunkBuffers& buffers = buffers_of(round);
    wait_for_transfers(buffers);
    const Part own = own_slice(piece(round, machine()));
    if (own.count == 0) return;
    reduce(buffers.sources, alone() ? in_own(own) : buffers.slices[machine()], own.count, call_.op);
  }

  // Step 3.
  void deliver_inside(size_t round) {
    const Part& own_piece = piece(round, machine());
    std::vector<size_t> receive_counts;
    for (int owner = 0; owner < local_size(); ++owner)
      receive_counts.push_back(common(slice_of(own_piece, owner), own_part()).count);
    run_inside({.operation = Operation::kAllToAll,
                .input = buffers_of(round).slices[machine()],
                .output = in_own(own_piece),
                .counts = shares_of(own_slice(own_piece)),
                .receive_counts = receive_counts,
                .dtype = call_.dtype});
  }
};

}  // namespace

void reduce_scatter(Hierarchy& hierarchy, const Call& call) { MachineReduceScatter(hierarchy, call).run(); }

}  // namespace lockstep
