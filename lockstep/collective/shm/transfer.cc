// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/transfer.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/thresholds.h"
#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

class Sending final : public Transfer {
 public:
  Sending(GroupState& group, const Call& call, std::uint32_t& sent)
      : group_(group), call_(call), bytes_(call.count * size_of(call.dtype)), sent_(sent) {}

  bool progress() override {
    if (header_ == nullptr && !post()) return false;
    if (header_->kind == Place::Kind::kSlot) return true;
    if (staging_.data() != nullptr) fill();
    return answered();
  }
  int peer() const override { return call_.peer; }
  bool holds_up(const Transfer& later) const override {
    const auto* other = dynamic_cast<const Sending*>(&later);
    return header_ == nullptr && other != nullptr && other->call_.peer == call_.peer;
  }
  std::string describe() const override {
    return concat("send of ", call_.count, " ", to_string(call_.dtype), " to rank ", call_.peer, ", tag ", call_.tag);
  }

 private:
  bool post();
  void write(MessageHeader& header);
  Place place_data();
  void fill();
  bool answered();
  const std::byte* input() const { return static_cast<const std::byte*>(call_.input); }
  void ring() { group_.area().progress(call_.peer).bell.ring(); }

  GroupState& group_;
  Call call_;
  std::size_t bytes_;
  std::uint32_t& sent_;
  MessageHeader* header_ = nullptr;
  Memory staging_;
};

bool Sending::post() {
  for (int i = 0; i < kMessagesPerPair; ++i) {
    MessageHeader& header = group_.area().message(group_.rank(), call_.peer, i);
    if (header.state.load(kAcquire) != MessageHeader::kFree) continue;
    write(header);
    header_ = &header;
    header.state.store(MessageHeader::kSent, kRelease);
    ring();
    return true;
  }
  return false;
}

void Sending::write(MessageHeader& header) {
  const Place place = place_data();
  header.order.store(sent_++, kRelaxed);
  header.filled.store(0, kRelaxed);
  header.emptied.store(0, kRelaxed);
  header.tag = call_.tag;
  header.count = call_.count;
  header.dtype = call_.dtype;
  header.kind = place.kind;
  header.owner = place.owner;
  header.at = place.at;
  header.refused = false;
  if (place.kind == Place::Kind::kSlot) copy_bytes(header.data.data(), input(), bytes_);
}

Place Sending::place_data() {
  if (bytes_ <= kInlineBytes) return {.kind = Place::Kind::kSlot};
  Place place = group_.locate(call_.input, bytes_);
  if (place.kind != Place::Kind::kPrivate) return place;
  const int mine = group_.machine_rank(group_.rank());
  staging_ = group_.machine().arena(mine)->allocate(kStagingChunks * group_.staging_bytes());
  return {.kind = Place::Kind::kPrivate, .owner = static_cast<std::uint16_t>(mine), .at = staging_.offset()};
}

// Chunk c goes into place c % kStagingChunks of the staging memory. The sender writes `filled`, the receiver `emptied`:
// a chunk is filled only once chunk c - kStagingChunks was emptied. Release and acquire on these two counters order the
// copies: the receiver sees the bytes of what is filled, the sender overwrites only what was read.
void Sending::fill() {
  const std::size_t chunk_bytes = group_.staging_bytes();
  std::size_t chunk = header_->filled.load(kRelaxed);
  for (; chunk * chunk_bytes < bytes_ && chunk < header_->emptied.load(kAcquire) + std::size_t{kStagingChunks};
       ++chunk) {
    const std::size_t begin = chunk * chunk_bytes;
    show_bytes(staging_.data() + chunk % kStagingChunks * chunk_bytes, input() + begin,
               std::min(chunk_bytes, bytes_ - begin));
    header_->filled.store(static_cast<std::uint32_t>(chunk + 1), kRelease);
    ring();
  }
}

bool Sending::answered() {
  if (header_->state.load(kAcquire) != MessageHeader::kAnswered) return false;
  const bool refused = header_->refused;
  const Signature wanted = header_->wanted;
  header_->state.store(MessageHeader::kFree, kRelease);
  if (refused)
    group_.disagree(call_.peer, describe(), concat("receive of ", wanted.count, " ", to_string(wanted.dtype)));
  return true;
}

class Receiving final : public Transfer {
 public:
  Receiving(GroupState& group, const Call& call)
      : group_(group), call_(call), bytes_(call.count * size_of(call.dtype)) {}

  bool progress() override {
    if (header_ == nullptr && !take_header()) return false;
    switch (header_->kind) {
      case Place::Kind::kSlot: return take_from_header();
      case Place::Kind::kPrivate: return empty();
      default: return take_in_place();
    }
  }
  int peer() const override { return call_.peer; }
  // While it waits, a message for it may arrive at any moment: a later receive that would match it must not take it.
  bool holds_up(const Transfer& later) const override {
    const auto* other = dynamic_cast<const Receiving*>(&later);
    if (header_ != nullptr || other == nullptr || other->call_.tag != call_.tag) return false;
    return call_.peer == kAnyRank || other->call_.peer == kAnyRank || other->call_.peer == call_.peer;
  }
  std::string describe() const override {
    const std::string from = call_.peer == kAnyRank ? "any rank" : group_.name(call_.peer);
    return concat("receive of ", call_.count, " ", to_string(call_.dtype), " from ", from, ", tag ", call_.tag);
  }

 private:
  std::byte* output() const { return static_cast<std::byte*>(call_.output); }
  bool take_header();
  MessageHeader* oldest_from(int rank) const;
  void refuse();
  bool take_from_header();
  bool take_in_place();
  bool empty();
  void answer(std::uint32_t state);

  GroupState& group_;
  Call call_;
  std::size_t bytes_;
  MessageHeader* header_ = nullptr;
};

// Release and acquire on `state` order the rest of the header. Headers of one sender and tag are taken in the order in
// which they were sent, whichever of the four they are in.
bool Receiving::take_header() {
  const int first = call_.peer == kAnyRank ? 0 : call_.peer;
  const int last = call_.peer == kAnyRank ? group_.size() - 1 : call_.peer;
  for (int rank = first; rank <= last && header_ == nullptr; ++rank) {
    // A first look may pass one header before it is sent and then see a later message in another. The later one was
    // sent after the earlier, so a second look sees both.
    header_ = oldest_from(rank) == nullptr ? nullptr : oldest_from(rank);
    source = rank;
  }
  if (header_ == nullptr) return false;
  if (header_->count != call_.count || header_->dtype != call_.dtype) refuse();
  header_->state.store(MessageHeader::kTaken, kRelaxed);
  return true;
}

MessageHeader* Receiving::oldest_from(int rank) const {
  MessageHeader* oldest = nullptr;
  for (int i = 0; i < kMessagesPerPair; ++i) {
    MessageHeader& header = group_.area().message(rank, group_.rank(), i);
    if (header.state.load(kAcquire) != MessageHeader::kSent || header.tag != call_.tag) continue;
    const std::uint32_t order = header.order.load(kRelaxed);
    if (oldest == nullptr || static_cast<std::int32_t>(order - oldest->order.load(kRelaxed)) < 0) oldest = &header;
  }
  return oldest;
}

void Receiving::refuse() {
  const std::string theirs = concat("send of ", header_->count, " ", to_string(header_->dtype));
  header_->wanted = {.operation = Operation::kReceive, .dtype = call_.dtype, .count = call_.count};
  header_->refused = true;
  answer(header_->kind == Place::Kind::kSlot ? MessageHeader::kFree : MessageHeader::kAnswered);
  group_.disagree(source, describe(), theirs);
}

bool Receiving::take_from_header() {
  copy_bytes(output(), header_->data.data(), bytes_);
  answer(MessageHeader::kFree);
  return true;
}

bool Receiving::take_in_place() {
  const Place place{.kind = header_->kind, .owner = header_->owner, .at = header_->at};
  {
    const GroupState::PeerAccess access(group_);
    copy_bytes(output(), group_.pointer(place, bytes_), bytes_);
  }
  answer(MessageHeader::kAnswered);
  return true;
}

// The other side of Sending::fill.
bool Receiving::empty() {
  const std::size_t chunk_bytes = group_.staging_bytes();
  const Place place{.kind = Place::Kind::kArena, .owner = header_->owner, .at = header_->at};
  const std::byte* const staging = group_.pointer(place, kStagingChunks * chunk_bytes);
  std::size_t chunk = header_->emptied.load(kRelaxed);
  for (; chunk < header_->filled.load(kAcquire); ++chunk) {
    const std::size_t begin = chunk * chunk_bytes;
    copy_bytes(output() + begin, staging + chunk % kStagingChunks * chunk_bytes, std::min(chunk_bytes, bytes_ - begin));
    header_->emptied.store(static_cast<std::uint32_t>(chunk + 1), kRelease);
    group_.area().progress(source).bell.ring();
  }
  if (chunk * chunk_bytes < bytes_) return false;
  answer(MessageHeader::kAnswered);
  return true;
}

void Receiving::answer(std::uint32_t state) {
  header_->state.store(state, kRelease);
  group_.area().progress(source).bell.ring();
}

}  // namespace

std::unique_ptr<Transfer> make_transfer(GroupState& group, const Call& call, IntVector<std::uint32_t>& sent) {
  if (call.operation == Operation::kReceive) return std::make_unique<Receiving>(group, call);
  return std::make_unique<Sending>(group, call, sent[call.peer]);
}

}  // namespace lockstep::shm
