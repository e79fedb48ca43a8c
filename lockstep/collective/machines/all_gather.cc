// SPDX-License-Identifier: Apache-2.0
// all_gather between machines.
//
// Notation: n machines, S slices (machine_collective.h), K bytes: the parts of all ranks together. For each round of
// pieces (machine_parts.h):
//
//   1   inside    all_gather of this machine's piece, into its place in the array
//   2   between   the owner of slice s sends its slice of this machine's piece to all other machines, and receives
//                 theirs
//   3   inside    all_gather of the other machines' slices, packed by owner; each rank copies them to their places
//
// (n-1)/n * K leave each machine, in one network round.
//
//   ring   Where each machine has one rank, parts of 64 KiB and more go around the ring of machines, in n-1 rounds: a
//          stream of data on each connection gets more through than many that take turns.
#include "lockstep/collective/machines/collectives.h"
#include "lockstep/collective/machines/machine_parts.h"

namespace lockstep {
namespace {

using shm::Part;

class MachineAllGather : private MachineParts {
 public:
  MachineAllGather(Hierarchy& hierarchy, const Call& call) : MachineParts(hierarchy, call, call.output, call.input) {}

  // While round c is in steps 1 and 2, what was sent in c-1 is waited for and shared.
  void run() {
    if (goes_around()) return go_around();
    run_pipeline(
        rounds(), [this](size_t round) { receive_from_all(round); },
        [this](size_t round) {
          gather_inside(round);
          if (owns_slice()) send_to_all(round);
        },
        [this](size_t round) {
          if (owns_slice()) wait_for_transfers(buffers_of(round));
          if (!alone()) share_inside(round);
        });
  }

 private:
  // In step k machine m sends the pieces of machine m-k to its right, and receives those of m-k-1 from its left.
  void go_around() {
    const int steps = machines() - 1;
    std::vector<GlooLink::Transfers> arriving;
    GlooLink::Transfers leaving;
    const auto part = [&](int step, size_t round) {
      return piece(round, (machine() + machines() - step) % machines());
    };
    const auto send = [&](int step, size_t round) {
      const Part out = part(step, round);
      if (step < steps) link().send(link().peers().front(), in_whole(out), bytes(out.count), leaving);
    };
    begin_check();
    for (int step = 1; step <= steps; ++step)
      for (size_t round = 0; round < rounds(); ++round) {
        const Part in = part(step, round);
        link().receive(link().peers().back(), in_whole(in), bytes(in.count), arriving.emplace_back());
      }
    for (size_t round = 0; round < rounds(); ++round) {
      gather_inside(round);
      send(0, round);
    }
    finish_check();
    for (size_t i = 0; i < arriving.size(); ++i) {
      link().wait(arriving[i]);
      send(to_int(i / rounds()) + 1, i % rounds());
    }
    link().wait(leaving);
  }

  // Step 1.
  void gather_inside(size_t round) {
    const Part& own_piece = piece(round, machine());
    if (!alone())
      run_inside(round, {.operation = Operation::kAllGather,
                         .input = in_own(own_piece),
                         .output = in_whole(own_piece),
                         .counts = shares_of(own_piece),
                         .dtype = call_.dtype});
    else if (own_piece.count > 0)
      std::memcpy(in_whole(own_piece), in_own(own_piece), bytes(own_piece.count));
  }

  // Step 2. A rank that is alone on its machine receives into the array itself.
  void receive_from_all(size_t round) {
    ChunkBuffers& buffers = buffers_of(round);
    buffers.slices.resize(machines());
    std::byte* next =
        alone() ? nullptr : grown(buffers.slice_memory, bytes(packed_counts(round, machine())[local_rank()]));
    for (int peer = 0; peer < machines(); ++peer) {
      if (peer == machine()) continue;
      const Part theirs = own_slice(piece(round, peer));
      buffers.slices[peer] = alone() ? in_whole(theirs) : std::exchange(next, next + bytes(theirs.count));
    }
    for (const int peer : link().peers())
      link().receive(peer, buffers.slices[peer], bytes(own_slice(piece(round, peer)).count), buffers.receives);
  }

  void send_to_all(size_t round) {
    const Part own = own_slice(piece(round, machine()));
    for (const int peer : link().peers()) link().send(peer, in_whole(own), bytes(own.count), buffers_of(round).sends);
  }

  // Step 3.
  void share_inside(size_t round) {
    ChunkBuffers& buffers = buffers_of(round);
    std::byte* const packed = grown(buffers.packed_memory, bytes(elements(round)));
    run_inside({.operation = Operation::kAllGather,
                .input = buffers.slice_memory.data(),
                .output = packed,
                .counts = packed_counts(round, machine()).elements(),
                .dtype = call_.dtype});
    const std::byte* next = packed;
    for (int owner = 0; owner < slices_; ++owner)
      for (const Part& slice : slices_of(round, owner, machine())) {
        if (slice.count > 0)
          std::memcpy(in_whole(slice), next, bytes(slice.count));  // without any there may be no memory
        next += bytes(slice.count);
      }
  }
};

}  // namespace

void all_gather(Hierarchy& hierarchy, const Call& call) { MachineAllGather(hierarchy, call).run(); }

}  // namespace lockstep
