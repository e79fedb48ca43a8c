// SPDX-License-Identifier: Apache-2.0
// collective/shm/transfer.h: one send or receive between two ranks, written as steps that never block.
//
// Each ordered pair of ranks has four message headers in the receiver's control memory. A sender fills a free one and
// rings the receiver's bell; the receiver takes the oldest header with its tag, copies the data, answers, and rings the
// sender's bell. Where the data travels:
//
//   up to 832 bytes       in the header itself: the sender is done at once
//   an arena, or threads  the header says where: the receiver copies from there
//   other memory          a few chunks in turn in the sender's arena: it fills while the receiver empties
//
// So one thread can have many of them under way, and a receive that waits does not hold up a send.
//
// Owns:    staging memory of its own, for a large message from ordinary memory
// Threads: one at a time
// Ranks:   the two that are named
#pragma once

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {

class Transfer {
  static constexpr auto kRelaxed = std::memory_order_relaxed;
  static constexpr auto kAcquire = std::memory_order_acquire;
  static constexpr auto kRelease = std::memory_order_release;

 public:
  // `sent`: of each rank, how many messages went there so far.
  Transfer(Group& group, const Call& call, IntVector<uint32_t>& sent)
      : group_(group), call_(call), bytes_(call.count * size_of(call.dtype)), sent_(sent) {}

  // Goes as far as it can without waiting; true once it is done. Throws MismatchError.
  bool progress() {
    if (header_ == nullptr && !(sends() ? post() : take_header())) return false;
    const bool in_header = header_->place.kind == Location::kSlot;
    if (sends()) {
      if (staging_.data() != nullptr) fill();
      return in_header || answered();
    }
    if (header_->place.kind == Location::kPrivate) return empty();
    if (in_header)
      copy_bytes(static_cast<std::byte*>(call_.output), header_->data.data(), bytes_);
    else
      take_in_place();
    return answer(in_header ? MessageHeader::kFree : MessageHeader::kAnswered);
  }

  // Tells whether `later` must not overtake this one: a send to the same rank; or a receive for which a message may
  // arrive at any moment, while it waits: a later receive that would match it must not take it.
  bool holds_up(const Transfer& later) const {
    if (header_ != nullptr || later.call_.operation != call_.operation) return false;
    if (sends()) return later.call_.peer == call_.peer;
    return later.call_.tag == call_.tag &&
           (call_.peer == kAnyRank || later.call_.peer == kAnyRank || later.call_.peer == call_.peer);
  }

  int peer() const { return call_.peer; }  // kAnyRank: nobody in particular
  int source() const { return source_; }   // of a receive that is done

  std::string describe() const {
    const std::string peer = call_.peer == kAnyRank ? "any rank" : group_.name(call_.peer);
    return concat(to_string(call_.operation), " of ", call_.count, " ", to_string(call_.dtype),
                  sends() ? " to " : " from ", peer, ", tag ", call_.tag);
  }

 private:
  bool sends() const { return call_.operation == Operation::kSend; }
  void ring(int rank) const { group_.area().progress(rank).bell.ring(); }

  // ---- A send

  bool post() {
    for (int i = 0; i < kMessagesPerPair; ++i) {
      MessageHeader& header = group_.area().message(group_.rank(), call_.peer, i);
      if (header.state.load(kAcquire) != MessageHeader::kFree) continue;
      write(header);
      header_ = &header;
      header.state.store(MessageHeader::kSent, kRelease);
      ring(call_.peer);
      return true;
    }
    return false;
  }

  void write(MessageHeader& header) {
    const Location place = place_data();
    header.order.store(sent_[call_.peer]++, kRelaxed);
    header.filled.store(0, kRelaxed);
    header.emptied.store(0, kRelaxed);
    header.tag = call_.tag;
    header.count = call_.count;
    header.dtype = call_.dtype;
    header.place = place;
    header.refused = false;
    if (place.kind == Location::kSlot)
      copy_bytes(header.data.data(), static_cast<const std::byte*>(call_.input), bytes_);
  }

  Location place_data() {
    if (bytes_ <= kInlineBytes) return {.kind = Location::kSlot};
    Location place = group_.locate(call_.input, bytes_);
    if (place.kind != Location::kPrivate) return place;
    staging_ = group_.allocate(kStagingChunks * group_.staging_bytes());
    place = in_arena(group_.machine_rank(group_.rank()), staging_.offset());
    place.kind = Location::kPrivate;
    return place;
  }

  // Chunk c goes into place c % kStagingChunks of the staging memory. The sender writes `filled`, the receiver
  // `emptied`: a chunk is filled only once chunk c - kStagingChunks was emptied. Release and acquire on these two
  // counters order the copies: the receiver sees the bytes of what is filled, the sender overwrites only what was read.
  void fill() {
    const size_t chunk_bytes = group_.staging_bytes();
    const auto* const input = static_cast<const std::byte*>(call_.input);
    size_t chunk = header_->filled.load(kRelaxed);
    for (; chunk * chunk_bytes < bytes_ && chunk < header_->emptied.load(kAcquire) + size_t{kStagingChunks}; ++chunk) {
      const size_t begin = chunk * chunk_bytes;
      show_bytes(staging_.data() + chunk % kStagingChunks * chunk_bytes, input + begin,
                 std::min(chunk_bytes, bytes_ - begin));
      header_->filled.store(static_cast<uint32_t>(chunk + 1), kRelease);
      ring(call_.peer);
    }
  }

  bool answered() {
    if (header_->state.load(kAcquire) != MessageHeader::kAnswered) return false;
    const bool refused = header_->refused;
    const Signature wanted = header_->wanted;
    header_->state.store(MessageHeader::kFree, kRelease);
    if (refused)
      group_.disagree(call_.peer, describe(), concat("receive of ", wanted.count, " ", to_string(wanted.dtype)));
    return true;
  }

  // ---- A receive

  // Release and acquire on `state` order the rest of the header. Headers of one sender and tag are taken in the order
  // in which they were sent, whichever of the four they are in.
  bool take_header() {
    const int first = call_.peer == kAnyRank ? 0 : call_.peer;
    const int last = call_.peer == kAnyRank ? group_.size() - 1 : call_.peer;
    for (int rank = first; rank <= last && header_ == nullptr; ++rank) {
      // A first look may pass one header before it is sent and then see a later message in another. The later one was
      // sent after the earlier, so a second look sees both.
      header_ = oldest_from(rank) == nullptr ? nullptr : oldest_from(rank);
      source_ = rank;
    }
    if (header_ == nullptr) return false;
    if (header_->count != call_.count || header_->dtype != call_.dtype) refuse();
    header_->state.store(MessageHeader::kTaken, kRelaxed);
    return true;
  }

  MessageHeader* oldest_from(int rank) const {
    MessageHeader* oldest = nullptr;
    for (int i = 0; i < kMessagesPerPair; ++i) {
      MessageHeader& header = group_.area().message(rank, group_.rank(), i);
      if (header.state.load(kAcquire) != MessageHeader::kSent || header.tag != call_.tag) continue;
      const uint32_t order = header.order.load(kRelaxed);
      if (oldest == nullptr || static_cast<int32_t>(order - oldest->order.load(kRelaxed)) < 0) oldest = &header;
    }
    return oldest;
  }

  void refuse() {
    const std::string theirs = concat("send of ", header_->count, " ", to_string(header_->dtype));
    header_->wanted = {.operation = Operation::kReceive, .dtype = call_.dtype, .count = call_.count};
    header_->refused = true;
    answer(header_->place.kind == Location::kSlot ? MessageHeader::kFree : MessageHeader::kAnswered);
    group_.disagree(source_, describe(), theirs);
  }

  void take_in_place() {
    const Group::PeerAccess access(group_);
    copy_bytes(static_cast<std::byte*>(call_.output), group_.pointer(header_->place, bytes_), bytes_);
  }

  // The other side of fill().
  bool empty() {
    const size_t chunk_bytes = group_.staging_bytes();
    const Location place = in_arena(header_->place.owner, header_->place.at);
    const std::byte* const staging = group_.pointer(place, kStagingChunks * chunk_bytes);
    auto* const output = static_cast<std::byte*>(call_.output);
    size_t chunk = header_->emptied.load(kRelaxed);
    for (; chunk < header_->filled.load(kAcquire); ++chunk) {
      const size_t begin = chunk * chunk_bytes;
      copy_bytes(output + begin, staging + chunk % kStagingChunks * chunk_bytes, std::min(chunk_bytes, bytes_ - begin));
      header_->emptied.store(static_cast<uint32_t>(chunk + 1), kRelease);
      ring(source_);
    }
    if (chunk * chunk_bytes < bytes_) return false;
    return answer(MessageHeader::kAnswered);
  }

  bool answer(uint32_t state) {
    header_->state.store(state, kRelease);
    ring(source_);
    return true;
  }

  Group& group_;
  Call call_;
  size_t bytes_;
  IntVector<uint32_t>& sent_;
  MessageHeader* header_ = nullptr;
  Memory staging_;  // of a send
  int source_ = kAnyRank;
};

}  // namespace lockstep::shm
