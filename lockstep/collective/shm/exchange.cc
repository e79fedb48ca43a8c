#include "lockstep/collective/shm/exchange.h"

#include <algorithm>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/shape.h"
#include "lockstep/collective/shm/split.h"
#include "lockstep/collective/shm/thresholds.h"
#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

struct Bytes {
  std::size_t begin = 0;
  std::size_t count = 0;
};

enum class Lanes { kOneForAll, kOneEach };

// What this rank shows and what it wants.
struct Plan {
  explicit Plan(int size)
      : messages(static_cast<std::size_t>(size)), wanted(messages.size()), found_at(messages.size()) {}

  const std::byte* input = nullptr;
  std::size_t input_bytes = 0;
  Lanes lanes = Lanes::kOneForAll;
  std::vector<Bytes> messages;  // kOneEach: of the input, for each rank
  std::byte* output = nullptr;
  std::vector<Bytes> wanted;          // of the output, from each rank; count 0: nothing
  std::vector<std::size_t> found_at;  // where in a peer's input that begins

  std::size_t longest_message() const {
    if (lanes == Lanes::kOneForAll) return input_bytes;
    return std::ranges::max(messages, {}, &Bytes::count).count;
  }
};

class Exchange {
 public:
  Exchange(GroupState& group, const Plan& plan) : group_(group), plan_(plan) {}

  void arrive();
  void transfer();

 private:
  Place show() const;
  Place place_of(int peer) const { return group_.announcement(peer).input(); }
  Bytes wanted(int peer) const { return plan_.wanted[static_cast<std::size_t>(peer)]; }
  void copy_at_once(int peer) const;
  void stream(std::size_t longest);
  void copy_in(std::size_t chunk);
  void copy_out(std::size_t chunk);
  Bytes part_of_chunk(std::size_t bytes, std::size_t chunk) const;

  GroupState& group_;
  const Plan& plan_;
  std::size_t lane_ = 0;
};

void Exchange::arrive() {
  const Place place = show();
  if (place.kind == Place::Kind::kSlot && group_.size() > 1)
    copy_bytes(group_.slot(group_.rank()), plan_.input, plan_.input_bytes);
  group_.arrive(place, {}, plan_.longest_message());
}

Place Exchange::show() const {
  if (plan_.input_bytes <= kOneShotExchangeBytes || group_.size() == 1) return {.kind = Place::Kind::kSlot};
  return group_.locate(plan_.input, plan_.input_bytes);
}

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
  const Bytes want = wanted(peer);
  if (want.count == 0) return;
  const std::size_t offset = plan_.found_at[static_cast<std::size_t>(peer)];
  if (peer == group_.rank()) return copy_bytes(plan_.output + want.begin, plan_.input + offset, want.count);
  const Place place = place_of(peer);
  if (place.kind == Place::Kind::kSlot)
    return copy_bytes(plan_.output + want.begin, group_.slot(peer) + offset, want.count);
  const GroupState::Touch touch(group_);
  copy_bytes(plan_.output + want.begin, group_.pointer(place, offset + want.count) + offset, want.count);
}

void Exchange::stream(std::size_t longest) {
  const auto lanes = static_cast<std::size_t>(plan_.lanes == Lanes::kOneEach ? group_.size() : 1);
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
  std::byte* const lanes = group_.staging(group_.rank(), chunk);
  if (plan_.lanes == Lanes::kOneForAll) {
    const Bytes part = part_of_chunk(plan_.input_bytes, chunk);
    return show_bytes(lanes, plan_.input + part.begin, part.count);
  }
  for (int reader = 0; reader < group_.size(); ++reader) {
    if (reader == group_.rank()) continue;
    const Bytes message = plan_.messages[static_cast<std::size_t>(reader)];
    const Bytes part = part_of_chunk(message.count, chunk);
    show_bytes(lanes + static_cast<std::size_t>(reader) * lane_, plan_.input + message.begin + part.begin, part.count);
  }
}

void Exchange::copy_out(std::size_t chunk) {
  const std::size_t lane = plan_.lanes == Lanes::kOneEach ? static_cast<std::size_t>(group_.rank()) * lane_ : 0;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank() || place_of(peer).kind != Place::Kind::kPrivate) continue;
    const Bytes part = part_of_chunk(wanted(peer).count, chunk);
    if (part.count == 0) continue;
    copy_bytes(plan_.output + wanted(peer).begin + part.begin, group_.staging(peer, chunk) + lane, part.count);
  }
}

void run_plan(GroupState& group, const Intent& intent, const Plan& plan) {
  group.begin(intent);
  Exchange exchange(group, plan);
  exchange.arrive();
  exchange.transfer();
}

Split split_of(std::size_t count, std::span<const std::size_t> counts, int size) {
  return counts.empty() ? Split::equal(count, size) : Split::uneven(counts);
}

Bytes in_bytes(Part part, std::size_t element) { return {part.begin * element, part.count * element}; }

void gather_parts(GroupState& group, const Intent& intent, const AllGather& call) {
  const std::size_t element = size_of(call.dtype);
  const Split split = split_of(call.count, call.counts, group.size());
  Plan plan(group.size());
  plan.input = static_cast<const std::byte*>(call.input);
  plan.input_bytes = split[group.rank()].count * element;
  plan.output = static_cast<std::byte*>(call.output);
  const bool wanted = intent.root < 0 || intent.root == group.rank();
  for (int peer = 0; peer < group.size() && wanted; ++peer)
    plan.wanted[static_cast<std::size_t>(peer)] = in_bytes(split[peer], element);
  run_plan(group, intent, plan);
}

// Everybody checks every pair of ranks, so that everybody throws.
void check_counts(const GroupState& group) {
  const int p = group.size();
  for (int from = 0; from < p; ++from)
    for (int to = 0; to < p; ++to) {
      const std::uint64_t sent = group.counts(from)[to];
      const std::uint64_t expected = group.counts(to)[p + from];
      if (sent == expected) continue;
      throw MismatchError({.what = concat(group.name(from), " sends ", sent, " elements to ", group.name(to),
                                          ", which expects ", expected),
                           .here = group.here(),
                           .likely = "send_counts of one rank and receive_counts of another that do not match",
                           .next = "exchange the counts first, with an even all_to_all"});
    }
}

void exchange_uneven(GroupState& group, const Intent& intent, const AllToAll& call, Plan& plan) {
  const std::size_t element = size_of(call.dtype);
  const auto p = static_cast<std::size_t>(group.size());
  const Split sends = Split::uneven(call.send_counts);
  const Split receives = Split::uneven(call.receive_counts);
  plan.input_bytes = sends.total() * element;
  group.begin(intent);
  for (std::size_t peer = 0; peer < p; ++peer) {
    plan.messages[peer] = in_bytes(sends[static_cast<int>(peer)], element);
    plan.wanted[peer] = in_bytes(receives[static_cast<int>(peer)], element);
    group.counts(group.rank())[peer] = call.send_counts[peer];
    group.counts(group.rank())[p + peer] = call.receive_counts[peer];
  }
  Exchange exchange(group, plan);
  exchange.arrive();
  check_counts(group);
  for (std::size_t peer = 0; peer < p; ++peer) {
    const std::uint64_t* const sent = group.counts(static_cast<int>(peer));
    plan.found_at[peer] = std::accumulate(sent, sent + group.rank(), std::uint64_t{0}) * element;
  }
  exchange.transfer();
}

}  // namespace

void barrier(GroupState& group) {
  group.begin({.operation = Operation::kBarrier});
  group.arrive({.kind = Place::Kind::kSlot}, {});
}

void broadcast(GroupState& group, const Broadcast& call) {
  const std::size_t bytes = call.count * size_of(call.dtype);
  Plan plan(group.size());
  plan.output = static_cast<std::byte*>(call.data);
  if (group.rank() == call.root) {
    plan.input = plan.output;
    plan.input_bytes = bytes;
  } else {
    plan.wanted[static_cast<std::size_t>(call.root)] = {0, bytes};
  }
  run_plan(group, {.operation = Operation::kBroadcast, .dtype = call.dtype, .root = call.root, .count = call.count},
           plan);
}

void all_gather(GroupState& group, const AllGather& call) {
  gather_parts(group,
               {.operation = Operation::kAllGather,
                .dtype = call.dtype,
                .count = split_of(call.count, call.counts, group.size()).total(),
                .shape = shape_of(call.counts)},
               call);
}

void gather(GroupState& group, const Gather& call) {
  gather_parts(
      group,
      {.operation = Operation::kGather,
       .dtype = call.dtype,
       .root = call.root,
       .count = split_of(call.count, call.counts, group.size()).total(),
       .shape = shape_of(call.counts)},
      {.input = call.input, .output = call.output, .count = call.count, .counts = call.counts, .dtype = call.dtype});
}

void gather_for_subgroup(GroupState& group, const void* input, void* output, std::size_t bytes) {
  gather_parts(group, {.operation = Operation::kSubgroup, .count = bytes},
               {.input = input, .output = output, .count = bytes, .dtype = DType::kUInt8});
}

void scatter(GroupState& group, const Scatter& call) {
  const std::size_t element = size_of(call.dtype);
  const Split split = split_of(call.count, call.counts, group.size());
  const auto root = static_cast<std::size_t>(call.root);
  Plan plan(group.size());
  plan.lanes = Lanes::kOneEach;
  plan.output = static_cast<std::byte*>(call.output);
  plan.wanted[root] = {0, split[group.rank()].count * element};
  plan.found_at[root] = split[group.rank()].begin * element;
  if (group.rank() == call.root) {
    plan.input = static_cast<const std::byte*>(call.input);
    plan.input_bytes = split.total() * element;
    for (int peer = 0; peer < group.size(); ++peer)
      plan.messages[static_cast<std::size_t>(peer)] = in_bytes(split[peer], element);
  }
  run_plan(group,
           {.operation = Operation::kScatter,
            .dtype = call.dtype,
            .root = call.root,
            .count = split.total(),
            .shape = shape_of(call.counts)},
           plan);
}

void all_to_all(GroupState& group, const AllToAll& call) {
  const std::size_t message = call.count * size_of(call.dtype);
  const bool even = call.send_counts.empty();
  const Intent intent{
      .operation = Operation::kAllToAll, .dtype = call.dtype, .count = even ? call.count : 0, .shape = even ? 0U : 1U};
  Plan plan(group.size());
  plan.lanes = Lanes::kOneEach;
  plan.input = static_cast<const std::byte*>(call.input);
  plan.output = static_cast<std::byte*>(call.output);
  if (!even) return exchange_uneven(group, intent, call, plan);
  plan.input_bytes = message * plan.messages.size();
  for (std::size_t peer = 0; peer < plan.messages.size(); ++peer) {
    plan.messages[peer] = plan.wanted[peer] = {peer * message, message};
    plan.found_at[peer] = static_cast<std::size_t>(group.rank()) * message;
  }
  run_plan(group, intent, plan);
}

}  // namespace lockstep::shm
