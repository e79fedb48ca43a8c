// SPDX-License-Identifier: Apache-2.0
// all_reduce, reduce and reduce_scatter: the default algorithm, kDirect.
//
// The array is cut into a part per rank. Rank r reduces part r of all ranks' inputs, in the order 0 ... p-1, and stores
// the result where it is wanted. K bytes, p ranks; what each rank does:
//
//   one shot   small arrays: copies K into its slot; arrives; reads all slots and reduces all that it wants by itself
//   direct     arrives; reads its part (K/p) of every input in place, writes the result into every output in place;
//              waits a second time, until all ranks are done. Of a large array it takes chunk after chunk as long as
//              there are any: a rank that is busy elsewhere, with the end of backward for instance, leaves them to others
//   staged     memory that peers can't reach, chunk by chunk through staging memory (Group::staging_bytes):
//     whole    two ranks: each stages all of its input and reduces the other's chunks with its own: K staged, K read
//     lanes    more: a chunk has a lane per rank. Each rank stages the parts of the others, reduces its own lane of the
//              chunk before from theirs and its own input, into its staged lane and its own output, and copies the
//              results of the chunk before that out of the others' lanes: K staged, 2K(p-1)/p read
//
// After arrive() all ranks see the same announcements, so all choose the same way.

#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/partition.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

// Parts begin on cache lines, if the array does: then no two ranks write to the same line.
Partition partition_of(const Call& call, int ranks) {
  if (call.operation == Operation::kReduceScatter) return Partition::of(call, ranks);
  return Partition::even(call.count, ranks, kCacheLine / size_of(call.dtype));
}

class Reducer {
 public:
  Reducer(Group& group, const Call& call)
      : group_(group), call_(call), parts_(partition_of(call, group.size())), element_(size_of(call.dtype)) {}

  // Says where input and output lie. Small data is shown where that costs least: up to 24 bytes in the announcement
  // itself, then in the slot where some peer could not reach it in place.
  void announce() const {
    if (bytes() <= Announcement::kLineBytes && fits_slot()) return group_.announce_line(input(), bytes());
    Location source = group_.locate(input(), bytes());
    const Location target = wants_all() ? group_.locate(output(), bytes()) : Location{};
    const bool out_of_reach = source.kind == Location::kPrivate || (wants_all() && target.kind == Location::kPrivate);
    if (fits_slot() && (out_of_reach || bytes() <= kAlwaysOneShotBytes)) {
      show_bytes(group_.slot(group_.rank()), input(), bytes());
      source = {.kind = Location::kSlot};
    }
    if (in_chunks() && group_.rank() == 0) chunks_taken().store(0, std::memory_order_relaxed);
    group_.announce(source, target);
  }

  bool all_within_reach() const {
    for (int peer = 0; peer < group_.size(); ++peer)
      if (!input_of(peer).within_reach() || (wants_all(peer) && !group_.announcement(peer).output().within_reach()))
        return false;
    return true;
  }

  bool fits_slot() const { return bytes() <= one_shot_reduction_bytes(group_.size()); }
  bool scatters() const { return call_.operation == Operation::kReduceScatter; }  // each rank wants its own part only

  void alone() const {
    group_.sources[0] = input();
    group_.destinations[0] = output();
    reduce(parts_.total());
  }

  // ---- One shot

  // Every rank reads p*K (or of its part) and reduces by itself. Slots and lines need no second wait: they are written
  // again in collective s+2, and no rank gets there before all have left s. A rank whose input is read in place has to
  // wait until its peers have read it, and keeps its own result in its slot until then: input and output may be the same.
  void one_shot() const {
    const Part part = scatters() ? parts_[group_.rank()] : Part{0, parts_.total()};
    bool read_in_place = false;
    for (int peer = 0; peer < group_.size(); ++peer) {
      group_.sources[peer] = shown_by(peer) + part.begin * element_;
      read_in_place |= input_of(peer).within_reach();
    }
    const bool wanted = scatters() || wants_all();
    const bool mine_in_place = input_of(group_.rank()).within_reach();
    group_.destinations[0] = mine_in_place ? group_.slot(group_.rank()) : output();
    if (wanted) {
      const Group::PeerAccess access(group_);
      reduce(part.count);
    }
    if (!read_in_place) return;
    group_.finish(1);
    if (wanted && mine_in_place) copy_bytes(output(), group_.slot(group_.rank()), part.count * element_);
  }

  // ---- Direct

  // Reads K/p of each of p inputs, writes K/p to each output. Ranks touch disjoint parts, so in place is safe: no other
  // rank reads or writes a part. The wait at the end says that all parts are written and that no input is read any more.
  void direct() const {
    {
      const Group::PeerAccess access(group_);
      if (in_chunks()) {
        const Part all{0, parts_.total()};
        const size_t most = kReducedChunkBytes / element_;
        const size_t chunks = chunks_of(all.count, most);
        for (size_t mine = chunks_taken().fetch_add(1); mine < chunks; mine = chunks_taken().fetch_add(1))
          reduce_part(all.chunk(mine, most));
      } else {
        reduce_part(parts_[group_.rank()]);
      }
    }
    group_.finish(1);
  }

  // ---- Staged

  // Step s stages chunk s of this rank's input, then reduces chunk s-1 of all ranks', which all have staged by then. The
  // root of a reduce stages nothing: no other rank reads its input.
  void staged_whole() const {
    group_.make_staging();
    const Part all{0, parts_.total()};
    const size_t per_chunk = group_.staging_bytes() / element_;
    const auto chunks = static_cast<uint32_t>(chunks_of(all.count, per_chunk));
    const bool stages = call_.operation == Operation::kAllReduce || !wants_all();
    for (uint32_t step = 0; step <= chunks; ++step) {
      if (step > 0) group_.post(step);
      const Part own = all.chunk(step, per_chunk);  // empty in the last step
      if (stages) show_bytes(group_.staging(group_.rank(), step), input(own.begin), own.count * element_);
      if (step == 0) continue;
      group_.wait(step);
      if (!wants_all()) continue;
      const Part part = all.chunk(step - 1, per_chunk);
      for (int peer = 0; peer < group_.size(); ++peer)
        group_.sources[peer] = peer == group_.rank() ? input(part.begin) : group_.staging(peer, step - 1);
      group_.destinations[0] = output(part.begin);
      reduce(part.count);
    }
    group_.finish(chunks + 1);
  }

  // Step s stages chunk s for the others; reduces the own lane of chunk s-1, which all have staged; copies the results of
  // chunk s-2, which all have reduced. A reduce_scatter is done after the second of these.
  void staged_lanes() const {
    group_.make_staging();
    const auto chunks = static_cast<uint32_t>(chunks_of(parts_.longest() * element_, lane_bytes()));
    const uint32_t last = chunks + (scatters() ? 0 : 1);
    for (uint32_t step = 0; step <= last; ++step) {
      if (step > 0) group_.post(step);
      if (step < chunks) stage_lanes(step);
      if (step > 0) group_.wait(step);
      if (step > 0 && step <= chunks) reduce_lane(step - 1);
      if (step > 1 && wants_all()) copy_lanes(step - 2);
    }
    group_.finish(last + 1);
  }

 private:
  // The address of element `begin`.
  const std::byte* input(size_t begin = 0) const {
    return static_cast<const std::byte*>(call_.input) + begin * element_;
  }
  std::byte* output(size_t begin = 0) const { return static_cast<std::byte*>(call_.output) + begin * element_; }
  size_t bytes() const { return parts_.total() * element_; }
  Location input_of(int rank) const { return group_.announcement(rank).input(); }

  bool wants_all(int rank) const {
    return call_.operation == Operation::kAllReduce || (call_.operation == Operation::kReduce && call_.root == rank);
  }
  bool wants_all() const { return wants_all(group_.rank()); }

  // Reduces `count` elements of group.sources into the first `outputs` of group.destinations, of which the first
  // `streamed` are stored past the caches (show_bytes).
  void reduce(size_t count, size_t outputs = 1, size_t streamed = 0) const {
    shm::reduce({.sources = group_.sources,
                 .destinations = std::span(group_.destinations).first(outputs),
                 .count = count,
                 .divisor = group_.size(),
                 .streamed = streamed},
                call_.dtype, call_.op);
  }

  const std::byte* shown_by(int peer) const {
    const Location place = input_of(peer);
    if (place.kind == Location::kSlot) return group_.slot(peer);
    if (place.kind != Location::kLine) return group_.pointer(place, bytes());
    std::byte* const line = group_.lines[peer].data();
    group_.announcement(peer).read_line(line);
    return line;
  }

  // Large arrays that some rank wants whole. The counter belongs to this collective: rank 0 zeroes it before it arrives.
  bool in_chunks() const { return !scatters() && bytes() >= kInChunksFromBytes; }
  std::atomic_ref<uint64_t> chunks_taken() const { return std::atomic_ref(*group_.counts(0)); }

  void reduce_part(Part part) const {
    const size_t offset = part.begin * element_;
    for (int peer = 0; peer < group_.size(); ++peer)
      group_.sources[peer] = group_.pointer(input_of(peer), bytes()) + offset;
    reduce(part.count, find_outputs(offset));
  }

  // Finds where the own part goes. Several ranks may name the same memory as their output: it is written once.
  size_t find_outputs(size_t offset) const {
    auto& outputs = group_.destinations;
    if (scatters()) {
      outputs[0] = output();
      return 1;
    }
    int found = 0;
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (!wants_all(peer)) continue;
      std::byte* const target = group_.pointer(group_.announcement(peer).output(), bytes()) + offset;
      if (std::find(outputs.begin(), outputs.begin() + found, target) == outputs.begin() + found)
        outputs[found++] = target;
    }
    return to_size(found);
  }

  size_t lane_bytes() const { return group_.lane_bytes(group_.size()); }
  Part lane_part(int rank, size_t chunk) const { return parts_[rank].chunk(chunk, lane_bytes() / element_); }
  std::byte* lane_of(int staged_by, int owner, size_t chunk) const {
    return group_.staging(staged_by, chunk) + to_size(owner) * lane_bytes();
  }

  void stage_lanes(size_t chunk) const {
    for (int owner = 0; owner < group_.size(); ++owner) {
      if (owner == group_.rank()) continue;
      const Part part = lane_part(owner, chunk);
      show_bytes(lane_of(group_.rank(), owner, chunk), input(part.begin), part.count * element_);
    }
  }

  // The result goes into this rank's own lane, which stage_lanes() leaves free, for the others to copy.
  void reduce_lane(size_t chunk) const {
    const int me = group_.rank();
    const Part part = lane_part(me, chunk);
    if (part.count == 0) return;
    for (int peer = 0; peer < group_.size(); ++peer)
      group_.sources[peer] = peer == me ? input(part.begin) : lane_of(peer, me, chunk);
    group_.destinations[0] = scatters() ? output(part.begin - parts_[me].begin) : lane_of(me, me, chunk);
    if (wants_all()) group_.destinations[1] = output(part.begin);
    const bool streams = !scatters() && part.count * element_ >= kStreamFromBytes;
    reduce(part.count, wants_all() ? 2 : 1, streams ? 1 : 0);
  }

  void copy_lanes(size_t chunk) const {
    for (int owner = 0; owner < group_.size(); ++owner) {
      if (owner == group_.rank()) continue;
      const Part part = lane_part(owner, chunk);
      copy_bytes(output(part.begin), lane_of(owner, owner, chunk), part.count * element_);
    }
  }

  Group& group_;
  const Call& call_;
  Partition parts_;  // rank r reduces part r
  size_t element_;   // bytes
};

}  // namespace

void all_reduce(Group& group, const Call& call) {
  const bool direct = call.algorithm == Algorithm::kDirect || call.algorithm == Algorithm::kFastest;
  if (call.operation == Operation::kAllReduce && !direct) return all_reduce_reference(group, call);
  const Reducer reducer(group, call);
  if (group.size() == 1) return reducer.alone();
  reducer.announce();
  group.arrive();
  if (reducer.all_within_reach())
    reducer.direct();
  else if (reducer.fits_slot())
    reducer.one_shot();
  else if (group.size() <= kReduceAllRanks && !reducer.scatters())
    reducer.staged_whole();
  else
    reducer.staged_lanes();
}

}  // namespace lockstep::shm
