// SPDX-License-Identifier: Apache-2.0
// all_reduce, reduce and barrier between machines.
//
// Notation: n machines, K bytes per rank, S slices (machine_collective.h). For each chunk of the array:
//
//   1   inside    reduce_scatter in shared memory: the owner of slice s gets this machine's sum of it
//   2a  between   the owner cuts its slice into n parts, one per machine, and sends part m to the owner on machine m;
//                 it receives its own part from all others and reduces the n arrays in the order of the machines
//   2b  between   the owner sends the reduced part to all others and receives theirs: it has the whole slice
//   3   inside    all_gather of the slices in shared memory
//
// Messages go straight to their receiver, n-1 at a time: 2a and 2b are one network round each, in which (n-1)/n * K leave
// a machine.
//
//   one shot   Owners send each other whole slices in 2a, each reduces for itself, and 2b is left out: one round. That
//              leaves (n-1)(n-2)/n * K more on a machine: nothing for two, and for a small K less than a round costs.
//   reduce     In 2b, or in one shot, only root's machine is sent to, and it alone does 3: K leave each other machine.
//   barrier    an all_reduce of a byte
//   ring       2a and 2b go around the ring of machines, in 2(n-1) rounds of K/n (Patarasuk and Yuan, 2009): if asked for,
//              and for large arrays between more than two machines (docs/design/hierarchy.md). A stream on one
//              connection gets more through than n-1 messages that take turns.
//
// Invariant: each slice of a chunk is reduced by one rank, in the order of the machines, or by each owner that wants it
// in that same order (one shot). So all ranks have the same bits in every run. (The ring's order starts at another
// machine for each part, but it is also one rank that adds.)
#include "lockstep/collective/machines/collectives.h"
#include "lockstep/collective/machines/machine_collective.h"

namespace lockstep {
namespace {

using shm::Part;
using shm::Partition;

constexpr int kResults = 1;                     // the lane of step 2b
constexpr size_t kRingChunk = size_t{8} << 20;  // bytes

bool goes_around(const Hierarchy& hierarchy, const Call& call) {
  if (call.operation != Operation::kAllReduce) return false;
  if (call.algorithm == Algorithm::kRing) return true;
  const bool rounded = call.dtype == DType::kFloat16 || call.dtype == DType::kBFloat16;
  const size_t part = call.count * size_of(call.dtype) / to_size(hierarchy.machines);
  return call.algorithm == Algorithm::kFastest && hierarchy.machines > 2 && part >= kRingFromBytes && !rounded;
}

class MachineAllReduce : private MachineCollective {
 public:
  // call.output: on every rank; it is overwritten, also where a reduce has no result.
  MachineAllReduce(Hierarchy& hierarchy, const Call& call)
      : MachineCollective(hierarchy, call, slices_for(call.count * size_of(call.dtype), hierarchy.smallest_machine)),
        data_(static_cast<std::byte*>(call.output)),
        ring_(goes_around(hierarchy, call)),
        one_shot_(!ring_ && is_worth_one_round(bytes(call.count), machines())),
        only_root_(call.operation == Operation::kReduce),
        root_machine_(hierarchy.topology.machine_of[call.root]),
        chunks_{call.count, (ring_ ? kRingChunk : chunk_bytes(bytes(call.count))) / bytes(1)} {
    if (call.input != call.output && call.count > 0) std::memcpy(call.output, call.input, bytes(call.count));
  }

  // While chunk c is reduced inside and its parts leave, c-1 is reduced between machines and c-2 is shared inside: the
  // network waits for neither.
  void run() {
    run_pipeline(
        chunks_.size(), [this](size_t chunk) { ring_ ? receive_around(chunk) : receive_parts(chunk); },
        [this](size_t chunk) {
          reduce_inside(chunk);
          if (owns_slice()) ring_ ? send_around(chunk) : send_parts(chunk);
        },
        [this](size_t chunk) {
          if (owns_slice()) ring_ ? go_around(chunk) : reduce_part(chunk);
        },
        [this](size_t chunk) { share_inside(chunk); });
  }

 private:
  // Elements of each local rank's slice of the chunk; 0 for ranks that own none.
  std::vector<size_t> counts_inside(size_t chunk) const {
    std::vector<size_t> counts;
    for (int owner = 0; owner < local_size(); ++owner) counts.push_back(slice_of(chunks_[chunk], owner).count);
    return counts;
  }

  // The part of a slice that a machine reduces.
  Part part_of(int machine, size_t slice_count) const {
    if (one_shot_) return {0, slice_count};
    return Partition::even(slice_count, machines(), kCacheLine / bytes(1))[machine];
  }

  // A rank that is alone on its machine works in the array itself.
  std::byte* slice_at(size_t chunk) {
    return alone() ? at(chunk) : grown(buffers_of(chunk).slice_memory, bytes(slice_count(chunk)));
  }

  // Step 1.
  void reduce_inside(size_t chunk) {
    if (alone()) return;
    run_inside(chunk, {.operation = Operation::kReduceScatter,
                       .input = at(chunk),
                       .output = slice_at(chunk),
                       .counts = counts_inside(chunk),
                       .dtype = call_.dtype,
                       .op = op_inside()});
  }

  // The receives of step 2. sources[m] is where the part from machine m arrives in 2a; the own machine's is in the slice.
  // In 2b machine m's part arrives where this machine's copy of it leaves from in 2a: it comes once m has that copy.
  void receive_parts(size_t chunk) {
    if (!reduces()) return;
    ChunkBuffers& buffers = buffers_of(chunk);
    const Part own = part_of(machine(), slice_count(chunk));
    std::byte* arriving = grown(buffers.received_memory, bytes(own.count) * link().peers().size());
    buffers.sources.assign(machines(), slice_at(chunk) + bytes(own.begin));
    for (const int peer : link().peers()) {
      link().receive(peer, arriving, bytes(own.count), buffers.receives);
      buffers.sources[peer] = std::exchange(arriving, arriving + bytes(own.count));
      if (one_shot_ || !wanted_by(machine())) continue;
      const Part theirs = part_of(peer, slice_count(chunk));
      link().receive(peer, slice_at(chunk) + bytes(theirs.begin), bytes(theirs.count), buffers.results, kResults);
    }
  }

  // Step 2a.
  void send_parts(size_t chunk) {
    for (const int peer : link().peers()) {
      if (one_shot_ && !wanted_by(peer)) continue;
      const Part theirs = part_of(peer, slice_count(chunk));
      link().send(peer, slice_at(chunk) + bytes(theirs.begin), bytes(theirs.count), buffers_of(chunk).sends);
    }
  }

  // The sum of step 2a, and 2b. In one shot the whole slice is about to change: what is sent of it must have left.
  void reduce_part(size_t chunk) {
    ChunkBuffers& buffers = buffers_of(chunk);
    link().wait(buffers.receives);
    if (one_shot_) link().wait(buffers.sends);
    if (!reduces()) return;
    const Part own = part_of(machine(), slice_count(chunk));
    std::byte* const result = slice_at(chunk) + bytes(own.begin);
    reduce(buffers.sources, result, own.count, call_.op);
    if (one_shot_) return;
    for (const int peer : link().peers())  // step 2b
      if (wanted_by(peer)) link().send(peer, result, bytes(own.count), buffers.sends, kResults);
  }

  // Step 3.
  void share_inside(size_t chunk) {
    if (owns_slice()) wait_for_transfers(buffers_of(chunk));
    if (alone() || !wanted_by(machine())) return;
    run_inside({.operation = Operation::kAllGather,
                .input = slice_at(chunk),
                .output = at(chunk),
                .counts = counts_inside(chunk),
                .dtype = call_.dtype});
  }

  // The ring, in pieces. In step k machine m sends part m-k to its right, and receives part m-k-1 from its left. In the
  // first n-1 steps it adds its own to what it receives; then part m+1 is complete here. In the others it receives complete
  // parts, where its own were before they left, and passes each on in the step after.
  template <class Visit>
  void for_each_piece(size_t chunk, int first_step, int last_step, const Visit& visit) {
    const size_t most = kRingPiece / bytes(1);
    for (int step = first_step; step <= last_step; ++step)
      for (size_t i = 0; i < shm::chunks_of(part_of(0, slice_count(chunk)).count, most); ++i) {
        const int machine_of_part = (machine() - step + 2 * machines()) % machines();
        const Part piece = part_of(machine_of_part, slice_count(chunk)).chunk(i, most);
        visit(step, slice_at(chunk) + bytes(piece.begin), piece.count);
      }
  }

  void receive_around(size_t chunk) {
    ChunkBuffers& buffers = buffers_of(chunk);
    std::byte* received = grown(buffers.received_memory, bytes(slice_count(chunk)));
    buffers.arriving.clear();
    for_each_piece(chunk, 1, last_step(), [&](int step, std::byte* own, size_t count) {
      std::byte* const to = adds(step) ? std::exchange(received, received + bytes(count)) : own;
      link().receive(link().peers().back(), to, bytes(count), buffers.arriving.emplace_back(), lane_of(chunk));
    });
  }

  void pass_on(size_t chunk, const std::byte* piece, size_t count) {
    link().send(link().peers().front(), piece, bytes(count), buffers_of(chunk).sends, lane_of(chunk));
  }

  void send_around(size_t chunk) {
    for_each_piece(chunk, 0, 0, [&](int, const std::byte* own, size_t count) { pass_on(chunk, own, count); });
  }

  void go_around(size_t chunk) {
    ChunkBuffers& buffers = buffers_of(chunk);
    const std::byte* received = buffers.received_memory.data();
    auto arriving = buffers.arriving.begin();
    for_each_piece(chunk, 1, last_step(), [&](int step, std::byte* own, size_t count) {
      link().wait(*arriving++);
      const std::array<const std::byte*, 2> sources{received, own};
      if (adds(step)) {
        reduce(sources, own, count, step == machines() - 1 ? call_.op : op_inside());
        received += bytes(count);
      }
      if (step < last_step()) pass_on(chunk, own, count);
    });
  }

  std::byte* at(size_t chunk) const { return data_ + bytes(chunks_[chunk].begin); }
  size_t slice_count(size_t chunk) const { return own_slice(chunks_[chunk]).count; }
  bool wanted_by(int machine) const { return !only_root_ || machine == root_machine_; }
  bool reduces() const { return !one_shot_ || wanted_by(machine()); }  // a part, or the whole

  int last_step() const { return 2 * (machines() - 1); }  // of the ring
  bool adds(int step) const { return step < machines(); }
  static int lane_of(size_t chunk) { return to_int(chunk % 2); }  // two may be under way: the next one begins

  std::byte* data_;
  bool ring_;
  bool one_shot_;
  bool only_root_;  // reduce: root's machine alone gets the result
  int root_machine_;
  Chunks chunks_;
};

}  // namespace

void all_reduce(Hierarchy& hierarchy, const Call& call) { MachineAllReduce(hierarchy, call).run(); }

// Ranks without a result work in a copy: their input stays as it is.
void reduce(Hierarchy& hierarchy, const Call& call) {
  if (call.output != nullptr) return MachineAllReduce(hierarchy, call).run();
  hierarchy.scratch = std::make_unique_for_overwrite<std::byte[]>(call.count * size_of(call.dtype));
  Call copy = call;
  copy.output = hierarchy.scratch.get();
  MachineAllReduce(hierarchy, copy).run();
}

void barrier(Hierarchy& hierarchy) {
  hierarchy.scratch = std::make_unique<std::byte[]>(1);
  const Call call{.operation = Operation::kBarrier,
                  .input = hierarchy.scratch.get(),
                  .output = hierarchy.scratch.get(),
                  .count = 1,
                  .dtype = DType::kUInt8};
  MachineAllReduce(hierarchy, call).run();
}

}  // namespace lockstep
