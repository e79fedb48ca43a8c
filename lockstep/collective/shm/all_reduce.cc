// SPDX-License-Identifier: Apache-2.0
// all_reduce, reduce and reduce_scatter: the default algorithm, kDirect.
//
// The array is cut into a part per rank. Rank r reduces part r of all ranks' inputs, in the order 0 ... p-1, and stores
// the result where it is wanted. K bytes, p ranks; what each rank does:
//
//   one shot   small arrays: copies K into its slot; arrives; reads all slots and reduces all that it wants by itself
//   direct     arrives; reads its part (K/p) of every input in place, writes the result into every output in place;
//              waits a second time, until all ranks are done. Of a large array it takes chunk after chunk as long as
//              there are any: who is busy elsewhere, with the end of backward for instance, leaves them to the others
//   staged     memory that peers can't reach: chunk by chunk through memory that they can (all_reduce_staged.cc)
//
// After begin() all ranks see the same announcements, so all choose the same way.
#include <algorithm>
#include <atomic>

#include "lockstep/collective/shm/collectives.h"
#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/reduce_task.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

bool within_reach(Place place) { return place.kind == Place::Kind::kArena || place.kind == Place::Kind::kAddress; }

class DirectReducer : ReduceTask {
 public:
  explicit DirectReducer(const ReduceTask& task) : ReduceTask(task) {}

  void run() {
    if (group.size() == 1) return alone();
    announce();
    if (all_within_reach())
      direct();
    else if (fits_slot())
      one_shot();
    else
      reduce_staged(*this);
  }

 private:
  bool fits_slot() const { return bytes() <= one_shot_reduction_bytes(group.size()); }
  Place input_of(int rank) const { return group.announcement(rank).input(); }
  Place output_of(int rank) const { return group.announcement(rank).output(); }

  void alone() {
    group.sources[0] = input();
    group.destinations[0] = output();
    reduce(partition.total(), 1);
  }

  void announce();
  void one_shot();
  const std::byte* shown_by(int peer) const;
  bool all_within_reach() const;

  // Large arrays that somebody wants whole. The counter belongs to this collective: rank 0 zeroes it before it arrives.
  bool in_chunks() const { return !scatters() && bytes() >= kInChunksFromBytes; }
  std::atomic_ref<std::uint64_t> chunks_taken() const { return std::atomic_ref(*group.counts(0)); }

  void direct();
  void reduce_chunks();
  void reduce_part(Part part);
  std::size_t find_outputs(std::size_t offset);
};

// Says where input and output lie. Small data is shown where that costs least: up to 24 bytes in the announcement
// itself, then in the slot where some peer could not reach it in place.
void DirectReducer::announce() {
  if (bytes() <= Announcement::kLineBytes && fits_slot()) return group.arrive_with(input(), bytes());
  Place source = group.locate(input(), bytes());
  const Place target = wants_all() ? group.locate(output(), bytes()) : Place{};
  const bool out_of_reach =
      source.kind == Place::Kind::kPrivate || (wants_all() && target.kind == Place::Kind::kPrivate);
  if (fits_slot() && (out_of_reach || bytes() <= kAlwaysOneShotBytes)) {
    show_bytes(group.slot(group.rank()), input(), bytes());
    source = {.kind = Place::Kind::kSlot};
  }
  if (in_chunks() && group.rank() == 0) chunks_taken().store(0, std::memory_order_relaxed);
  group.arrive(source, target);
}

const std::byte* DirectReducer::shown_by(int peer) const {
  const Place place = input_of(peer);
  if (place.kind == Place::Kind::kSlot) return group.slot(peer);
  if (place.kind != Place::Kind::kLine) return group.pointer(place, bytes());
  std::byte* const line = group.lines[peer].data();
  group.announcement(peer).read_line(line);
  return line;
}

// Every rank reads p*K (or of its part) and reduces by itself. Slots and lines need no second wait: they are written
// again in collective s+2, and nobody gets there before all have left s. A rank whose input is read in place has to
// wait until its peers have read it, and keeps its own result in its slot until then: input and output may be the same.
void DirectReducer::one_shot() {
  const Part part = scatters() ? partition[group.rank()] : Part{0, partition.total()};
  bool read_in_place = false;
  for (int peer = 0; peer < group.size(); ++peer) {
    group.sources[peer] = shown_by(peer) + part.begin * element;
    read_in_place |= within_reach(input_of(peer));
  }
  const bool wanted = scatters() || wants_all();
  const bool mine_in_place = within_reach(input_of(group.rank()));
  group.destinations[0] = mine_in_place ? group.slot(group.rank()) : output();
  if (wanted) {
    const GroupState::PeerAccess access(group);
    reduce(part.count, 1);
  }
  if (!read_in_place) return;
  group.finish(1);
  if (wanted && mine_in_place) copy_bytes(output(), group.slot(group.rank()), part.count * element);
}

bool DirectReducer::all_within_reach() const {
  for (int peer = 0; peer < group.size(); ++peer)
    if (!within_reach(input_of(peer)) || (wants_all(peer) && !within_reach(output_of(peer)))) return false;
  return true;
}

// Reads K/p of each of p inputs, writes K/p to each output. Ranks touch disjoint parts, so in place is safe: nobody else
// reads or writes a part. The wait at the end says that all parts are written and that no input is read any more.
void DirectReducer::direct() {
  {
    const GroupState::PeerAccess access(group);
    if (in_chunks())
      reduce_chunks();
    else
      reduce_part(partition[group.rank()]);
  }
  group.finish(1);
}

void DirectReducer::reduce_chunks() {
  const Part all{0, partition.total()};
  const std::size_t most = kReducedChunkBytes / element;
  const std::size_t chunks = chunks_of(all.count, most);
  const std::atomic_ref<std::uint64_t> taken = chunks_taken();
  for (std::size_t mine = taken.fetch_add(1); mine < chunks; mine = taken.fetch_add(1))
    reduce_part(all.chunk(mine, most));
}

void DirectReducer::reduce_part(Part part) {
  const std::size_t offset = part.begin * element;
  for (int peer = 0; peer < group.size(); ++peer) group.sources[peer] = group.pointer(input_of(peer), bytes()) + offset;
  reduce(part.count, find_outputs(offset));
}

// Where the own part goes. Several ranks may name the same memory as their output: it is written once.
std::size_t DirectReducer::find_outputs(std::size_t offset) {
  auto& outputs = group.destinations;
  if (scatters()) {
    outputs[0] = output();
    return 1;
  }
  int found = 0;
  for (int peer = 0; peer < group.size(); ++peer) {
    if (!wants_all(peer)) continue;
    std::byte* const target = group.pointer(output_of(peer), bytes()) + offset;
    if (std::find(outputs.begin(), outputs.begin() + found, target) == outputs.begin() + found)
      outputs[found++] = target;
  }
  return static_cast<unsigned>(found);
}

// Parts begin on cache lines, if the array does: then no two ranks write to the same line.
Partition partition_of(const Call& call, int ranks) {
  if (call.operation == Operation::kReduceScatter) return Partition::of(call, ranks);
  return Partition::even(call.count, ranks, kCacheLine / size_of(call.dtype));
}

}  // namespace

void ReduceTask::reduce(std::size_t count, std::size_t outputs, std::size_t streamed) const {
  shm::reduce({.sources = group.sources,
               .destinations = std::span(group.destinations).first(outputs),
               .count = count,
               .divisor = group.size(),
               .streamed = streamed},
              call.dtype, call.op);
}

void all_reduce(GroupState& group, const Call& call) {
  group.begin(signature_of(call));
  DirectReducer({group, call, partition_of(call, group.size())}).run();
}

}  // namespace lockstep::shm
