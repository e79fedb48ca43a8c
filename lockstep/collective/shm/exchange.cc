// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/exchange.h"

#include <algorithm>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/partition.h"
#include "lockstep/collective/shm/thresholds.h"
#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

struct Bytes {
  std::size_t begin = 0;
  std::size_t count = 0;
};

Bytes in_bytes(Part part, std::size_t element) { return {part.begin * element, part.count * element}; }

// Which bytes this rank shows, and which it takes from each rank.
struct Routes {
  explicit Routes(const Call& call, int size)
      : input(static_cast<const std::byte*>(call.input)),
        output(static_cast<std::byte*>(call.output)),
        taken(size),
        found_at(size) {}

  const std::byte* input;
  std::size_t input_bytes = 0;  // 0: this rank shows nothing
  IntVector<Bytes> given;       // of the input, to each rank; empty: all of it to all
  std::byte* output;
  IntVector<Bytes> taken;           // of the output, from each rank; count 0: nothing
  IntVector<std::size_t> found_at;  // where in that rank's input it begins

  bool all_alike() const { return given.empty(); }
  std::size_t longest_message() const {
    return all_alike() ? input_bytes : std::ranges::max(given, {}, &Bytes::count).count;
  }
};

class Exchange {
 public:
  Exchange(GroupState& group, const Routes& routes) : group_(group), routes_(routes) {}

  void run() {
    arrive();
    transfer();
  }

  void arrive();
  void transfer();

 private:
  Place show() const;
  Place place_of(int peer) const { return group_.announcement(peer).input(); }
  void copy_at_once(int peer) const;
  void stream(std::size_t longest);
  void copy_in(std::size_t chunk);
  void copy_out(std::size_t chunk);
  Bytes part_of_chunk(std::size_t bytes, std::size_t chunk) const;

  GroupState& group_;
  const Routes& routes_;
  std::size_t lane_ = 0;  // bytes
};

void Exchange::arrive() {
  const Place place = show();
  if (place.kind == Place::Kind::kSlot && group_.size() > 1)
    copy_bytes(group_.slot(group_.rank()), routes_.input, routes_.input_bytes);
  group_.arrive(place, {}, routes_.longest_message());
}

Place Exchange::show() const {
  if (routes_.input_bytes <= kOneShotExchangeBytes || group_.size() == 1) return {.kind = Place::Kind::kSlot};
  return group_.locate(routes_.input, routes_.input_bytes);
}

// Copies from all that show their input in a slot or in place, then streams from those that stage. All ranks see the
// same announcements, so all of them stream, through as many chunks as the longest staged message has, or none does.
// Without a stream, a second wait is needed only where some input is read in place: its owner waits until all ranks
// have posted that they are done reading.
void Exchange::transfer() {
  bool read_in_place = false;
  std::size_t longest_staged = 0;
  for (int peer = 0; peer < group_.size(); ++peer) {
    const Place::Kind kind = place_of(peer).kind;
    if (kind == Place::Kind::kPrivate) longest_staged = std::max(longest_staged, group_.announcement(peer).longest());
    read_in_place |= kind == Place::Kind::kArena || kind == Place::Kind::kAddress;
    if (peer == group_.rank() || kind != Place::Kind::kPrivate) copy_at_once(peer);
  }
  if (longest_staged > 0) return stream(longest_staged);
  if (!read_in_place) return;
  group_.post(1);
  if (place_of(group_.rank()).kind != Place::Kind::kSlot) group_.wait_all(1);
  group_.end(1);
}

void Exchange::copy_at_once(int peer) const {
  const Bytes taken = routes_.taken[peer];
  if (taken.count == 0) return;
  std::byte* const to = routes_.output + taken.begin;
  const std::size_t offset = routes_.found_at[peer];
  if (peer == group_.rank()) return copy_bytes(to, routes_.input + offset, taken.count);
  const Place place = place_of(peer);
  if (place.kind == Place::Kind::kSlot) return copy_bytes(to, group_.slot(peer) + offset, taken.count);
  const GroupState::PeerAccess access(group_);
  copy_bytes(to, group_.pointer(place, offset + taken.count) + offset, taken.count);
}

// Step s fills this rank's chunk s, then copies what this rank takes out of chunk s-1 of every rank that stages.
// GroupState::stream says why no chunk is overwritten before it was read.
void Exchange::stream(std::size_t longest) {
  const auto lanes = static_cast<unsigned>(routes_.all_alike() ? 1 : group_.size());
  lane_ = group_.staging_bytes() / lanes / kCacheLine * kCacheLine;
  const bool mine = place_of(group_.rank()).kind == Place::Kind::kPrivate;
  if (mine) group_.make_staging();
  const auto stage = [&](std::size_t chunk) {
    if (mine) copy_in(chunk);
  };
  group_.stream((longest + lane_ - 1) / lane_, 1, stage, [&](std::size_t step) { copy_out(step - 1); });
}

Bytes Exchange::part_of_chunk(std::size_t bytes, std::size_t chunk) const {
  const std::size_t begin = std::min(bytes, chunk * lane_);
  return {begin, std::min(lane_, bytes - begin)};
}

void Exchange::copy_in(std::size_t chunk) {
  std::byte* lane = group_.staging(group_.rank(), chunk);
  if (routes_.all_alike()) {
    const Bytes part = part_of_chunk(routes_.input_bytes, chunk);
    return show_bytes(lane, routes_.input + part.begin, part.count);
  }
  for (int reader = 0; reader < group_.size(); ++reader, lane += lane_) {
    if (reader == group_.rank()) continue;
    const Bytes message = routes_.given[reader];
    const Bytes part = part_of_chunk(message.count, chunk);
    show_bytes(lane, routes_.input + message.begin + part.begin, part.count);
  }
}

void Exchange::copy_out(std::size_t chunk) {
  const std::size_t lane = routes_.all_alike() ? 0 : static_cast<unsigned>(group_.rank()) * lane_;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank() || place_of(peer).kind != Place::Kind::kPrivate) continue;
    const Bytes taken = routes_.taken[peer];
    const Bytes part = part_of_chunk(taken.count, chunk);
    if (part.count == 0) continue;
    copy_bytes(routes_.output + taken.begin + part.begin, group_.staging(peer, chunk) + lane, part.count);
  }
}

// Every rank checks every pair of ranks, so that all of them throw.
void check_pairs(const GroupState& group) {
  const int p = group.size();
  for (int from = 0; from < p; ++from)
    for (int to = 0; to < p; ++to) {
      const std::uint64_t sent = group.counts(from)[to];
      const std::uint64_t expected = group.counts(to)[p + from];
      if (sent == expected) continue;
      throw MismatchError({.what = concat(group.name(from), " sends ", sent, " elements to ", group.name(to),
                                          ", which expects ", expected),
                           .here = group.here(),
                           .likely = "send counts of one rank and receive counts of another that do not match",
                           .next = "exchange the counts first, with an even all_to_all"});
    }
}

void all_to_all_even(GroupState& group, const Call& call, Routes& routes) {
  const std::size_t message = call.count * size_of(call.dtype);
  const Partition parts = Partition::equal(message, group.size());
  routes.input_bytes = parts.total();
  for (int peer = 0; peer < group.size(); ++peer) {
    routes.given[peer] = routes.taken[peer] = in_bytes(parts[peer], 1);
    routes.found_at[peer] = parts[group.rank()].begin;
  }
  Exchange(group, routes).run();
}

// Each rank also publishes what it sends to and expects from each: where its message begins in a sender's input is the
// sum of what that one sends to the ranks before it.
void all_to_all_uneven(GroupState& group, const Call& call, Routes& routes) {
  const std::size_t element = size_of(call.dtype);
  const Partition sends = Partition::uneven(call.counts);
  const Partition receives = Partition::uneven(call.receive_counts);
  routes.input_bytes = sends.total() * element;
  std::uint64_t* const published = group.counts(group.rank());
  for (int peer = 0; peer < group.size(); ++peer) {
    routes.given[peer] = in_bytes(sends[peer], element);
    routes.taken[peer] = in_bytes(receives[peer], element);
    published[peer] = sends[peer].count;
    published[group.size() + peer] = receives[peer].count;
  }
  Exchange exchange(group, routes);
  exchange.arrive();
  check_pairs(group);
  for (int peer = 0; peer < group.size(); ++peer) {
    const std::uint64_t* const sent = group.counts(peer);
    routes.found_at[peer] = std::accumulate(sent, sent + group.rank(), std::uint64_t{0}) * element;
  }
  exchange.transfer();
}

}  // namespace

void barrier(GroupState& group) {
  group.begin({.operation = Operation::kBarrier});
  group.arrive({.kind = Place::Kind::kSlot}, {});
}

void broadcast(GroupState& group, const Call& call) {
  group.begin(signature_of(call));
  const std::size_t bytes = call.count * size_of(call.dtype);
  Routes routes(call, group.size());
  routes.input = routes.output;
  if (group.rank() == call.root)
    routes.input_bytes = bytes;
  else
    routes.taken[call.root] = {0, bytes};
  Exchange(group, routes).run();
}

void gather(GroupState& group, const Call& call) {
  group.begin(signature_of(call));
  const std::size_t element = size_of(call.dtype);
  const Partition parts = Partition::of(call, group.size());
  Routes routes(call, group.size());
  routes.input_bytes = parts[group.rank()].count * element;
  const bool wanted = call.operation != Operation::kGather || call.root == group.rank();
  for (int peer = 0; peer < group.size() && wanted; ++peer) routes.taken[peer] = in_bytes(parts[peer], element);
  Exchange(group, routes).run();
}

void scatter(GroupState& group, const Call& call) {
  group.begin(signature_of(call));
  const std::size_t element = size_of(call.dtype);
  const Partition parts = Partition::of(call, group.size());
  const Bytes mine = in_bytes(parts[group.rank()], element);
  Routes routes(call, group.size());
  routes.given.resize(group.size());
  routes.taken[call.root] = {0, mine.count};
  routes.found_at[call.root] = mine.begin;
  if (group.rank() == call.root) {
    routes.input_bytes = parts.total() * element;
    for (int peer = 0; peer < group.size(); ++peer) routes.given[peer] = in_bytes(parts[peer], element);
  }
  Exchange(group, routes).run();
}

void all_to_all(GroupState& group, const Call& call) {
  group.begin(signature_of(call));
  Routes routes(call, group.size());
  routes.given.resize(group.size());
  if (call.counts.empty())
    all_to_all_even(group, call, routes);
  else
    all_to_all_uneven(group, call, routes);
}

}  // namespace lockstep::shm
