// SPDX-License-Identifier: Apache-2.0
// The collectives that move data and compute nothing: broadcast, all_gather, gather, scatter and all_to_all. Each
// rank shows its input; each rank then copies what it wants of the others' inputs.
//
// A rank shows its K bytes in one of three ways, and its peers learn which from its announcement:
//
//   slot    at most 4 KiB: copied into its slot before it arrives; nobody waits again
//   direct  memory that its peers can reach: they copy from where it lies, and the rank waits until all have
//   staged  other memory: in chunks through its staging memory, one wait per chunk. Where all ranks want the same
//           bytes a chunk is one piece; where each wants its own, a chunk has a lane per rank
//
// Memory traffic: one read and one write per byte and reader; twice that when staged.

#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/partition.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

// Says which bytes this rank shows, and which it takes from each rank: set the fields first, then run it.
class Exchange {
 public:
  Exchange(Group& group, const Call& call)
      : input(static_cast<const std::byte*>(call.input)),
        output(static_cast<std::byte*>(call.output)),
        taken(group.size()),
        found_at(group.size()),
        group_(group),
        element_(size_of(call.dtype)) {}

  const std::byte* input;
  size_t input_bytes = 0;  // 0: this rank shows nothing
  IntVector<Part> given;   // of the input, to each rank; empty: all of it to all
  std::byte* output;
  IntVector<Part> taken;       // of the output, from each rank; count 0: nothing
  IntVector<size_t> found_at;  // where in that rank's input it begins

  Part bytes_of(Part elements) const { return {elements.begin * element_, elements.count * element_}; }

  void run() {
    arrive();
    transfer();
  }

  void arrive() {
    const Location place = show();
    if (place.kind == Location::kSlot && group_.size() > 1) copy_bytes(group_.slot(group_.rank()), input, input_bytes);
    group_.announce(place, {}, given.empty() ? input_bytes : std::ranges::max(given, {}, &Part::count).count);
    group_.arrive();
  }

  // Copies from all that show their input in a slot or in place, then streams from those that stage. All ranks see the
  // same announcements, so all of them stream, through as many chunks as the longest staged message has, or none does.
  // Without a stream, a second wait is needed only where some input is read in place: its owner waits until all ranks
  // have posted that they are done reading.
  void transfer() {
    bool read_in_place = false;
    size_t longest_staged = 0;
    for (int peer = 0; peer < group_.size(); ++peer) {
      const Location place = place_of(peer);
      if (place.kind == Location::kPrivate)
        longest_staged = std::max(longest_staged, group_.announcement(peer).longest());
      read_in_place |= place.within_reach();
      if (peer == group_.rank() || place.kind != Location::kPrivate) copy_at_once(peer);
    }
    if (longest_staged > 0) return stream(longest_staged);
    if (!read_in_place) return;
    group_.post(1);
    if (place_of(group_.rank()).kind != Location::kSlot) group_.wait(1);
    group_.end(1);
  }

 private:
  Location show() const {
    if (input_bytes <= kOneShotExchangeBytes || group_.size() == 1) return {.kind = Location::kSlot};
    return group_.locate(input, input_bytes);
  }

  Location place_of(int peer) const { return group_.announcement(peer).input(); }

  void copy_at_once(int peer) const {
    const Part part = taken[peer];
    if (part.count == 0) return;
    std::byte* const to = output + part.begin;
    const size_t offset = found_at[peer];
    if (peer == group_.rank()) return copy_bytes(to, input + offset, part.count);
    const Location place = place_of(peer);
    if (place.kind == Location::kSlot) return copy_bytes(to, group_.slot(peer) + offset, part.count);
    const Group::PeerAccess access(group_);
    copy_bytes(to, group_.pointer(place, offset + part.count) + offset, part.count);
  }

  // Step s fills this rank's chunk s, then copies what this rank takes out of chunk s-1 of every rank that stages.
  // Group::staging_bytes says why no chunk is overwritten before it was read.
  void stream(size_t longest) {
    const size_t lane_bytes = group_.lane_bytes(given.empty() ? 1 : group_.size());
    const bool mine = place_of(group_.rank()).kind == Location::kPrivate;
    if (mine) group_.make_staging();
    const auto chunks = static_cast<uint32_t>(chunks_of(longest, lane_bytes));
    for (uint32_t step = 0; step <= chunks; ++step) {
      if (step > 0) group_.post(step);
      if (mine && step < chunks) copy_in(step, lane_bytes);
      if (step == 0) continue;
      group_.wait(step);
      copy_out(step - 1, lane_bytes);
    }
    group_.finish(chunks + 1);
  }

  void copy_in(size_t chunk, size_t lane_bytes) const {
    std::byte* lane = group_.staging(group_.rank(), chunk);
    if (given.empty()) {
      const Part part = Part{0, input_bytes}.chunk(chunk, lane_bytes);
      return show_bytes(lane, input + part.begin, part.count);
    }
    for (int reader = 0; reader < group_.size(); ++reader, lane += lane_bytes) {
      if (reader == group_.rank()) continue;
      const Part part = given[reader].chunk(chunk, lane_bytes);
      show_bytes(lane, input + part.begin, part.count);
    }
  }

  void copy_out(size_t chunk, size_t lane_bytes) const {
    const size_t lane = given.empty() ? 0 : to_size(group_.rank()) * lane_bytes;
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer == group_.rank() || place_of(peer).kind != Location::kPrivate) continue;
      const Part part = taken[peer].chunk(chunk, lane_bytes);
      if (part.count > 0) copy_bytes(output + part.begin, group_.staging(peer, chunk) + lane, part.count);
    }
  }

  Group& group_;
  size_t element_;
};

// Every rank checks every pair of ranks, so that all of them throw.
void check_pairs(const Group& group) {
  const int p = group.size();
  for (int from = 0; from < p; ++from)
    for (int to = 0; to < p; ++to) {
      const uint64_t sent = group.counts(from)[to];
      const uint64_t expected = group.counts(to)[p + from];
      if (sent != expected) refuse_counts(group.name(from), sent, group.name(to), expected, group.here());
    }
}

}  // namespace

void broadcast(Group& group, const Call& call) {
  Exchange exchange(group, call);
  const Part all = exchange.bytes_of({0, call.count});
  exchange.input = exchange.output;
  if (group.rank() == call.root)
    exchange.input_bytes = all.count;
  else
    exchange.taken[call.root] = all;
  exchange.run();
}

void gather(Group& group, const Call& call) {
  Exchange exchange(group, call);
  const Partition parts = Partition::of(call, group.size());
  exchange.input_bytes = exchange.bytes_of(parts[group.rank()]).count;
  const bool wanted = call.operation != Operation::kGather || call.root == group.rank();
  for (int peer = 0; peer < group.size() && wanted; ++peer) exchange.taken[peer] = exchange.bytes_of(parts[peer]);
  exchange.run();
}

void scatter(Group& group, const Call& call) {
  Exchange exchange(group, call);
  const Partition parts = Partition::of(call, group.size());
  const Part mine = exchange.bytes_of(parts[group.rank()]);
  exchange.given.resize(group.size());
  exchange.taken[call.root] = {0, mine.count};
  exchange.found_at[call.root] = mine.begin;
  if (group.rank() == call.root) {
    exchange.input_bytes = exchange.bytes_of({0, parts.total()}).count;
    for (int peer = 0; peer < group.size(); ++peer) exchange.given[peer] = exchange.bytes_of(parts[peer]);
  }
  exchange.run();
}

// With uneven parts each rank also publishes its counts, to and from each rank: a message begins in the sender's input
// after all that the sender sends to the ranks before.
void all_to_all(Group& group, const Call& call) {
  Exchange exchange(group, call);
  const bool even = call.counts.empty();
  const Partition sends = Partition::of(call, group.size());
  const Partition receives = even ? sends : Partition::uneven(call.receive_counts);
  exchange.input_bytes = exchange.bytes_of({0, sends.total()}).count;
  exchange.given.resize(group.size());
  for (int peer = 0; peer < group.size(); ++peer) {
    exchange.given[peer] = exchange.bytes_of(sends[peer]);
    exchange.taken[peer] = exchange.bytes_of(receives[peer]);
    exchange.found_at[peer] = exchange.bytes_of(sends[group.rank()]).begin;
    if (even) continue;
    group.counts(group.rank())[peer] = sends[peer].count;
    group.counts(group.rank())[group.size() + peer] = receives[peer].count;
  }
  exchange.arrive();
  if (!even) {
    check_pairs(group);
    for (int peer = 0; peer < group.size(); ++peer) {
      const uint64_t* const sent = group.counts(peer);
      const auto before = std::accumulate(sent, sent + group.rank(), uint64_t{0});
      exchange.found_at[peer] = exchange.bytes_of({before, 0}).begin;
    }
  }
  exchange.transfer();
}

}  // namespace lockstep::shm
