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

#include <string>

#include "lockstep/collective/calls/call.h"
#include "lockstep/collective/shm/group.h"

namespace lockstep::shm {

class Transfer {
 public:
  // `sent`: of each rank, how many messages went there so far.
  Transfer(Group& group, const Call& call, IntVector<std::uint32_t>& sent)
      : group_(group), call_(call), bytes_(call.count * size_of(call.dtype)), sent_(sent) {}

  // Goes as far as it can without waiting; true once it is done. Throws MismatchError.
  bool progress();
  bool holds_up(const Transfer& later) const;  // which must not overtake this one
  int peer() const { return call_.peer; }      // kAnyRank: nobody in particular
  int source() const { return source_; }       // of a receive that is done
  std::string describe() const;

 private:
  bool sends() const { return call_.operation == Operation::kSend; }
  void ring(int rank) const { group_.area().progress(rank).bell.ring(); }

  bool post();
  void write(MessageHeader& header);
  Location place_data();
  void fill();
  bool answered();

  bool take_header();
  MessageHeader* oldest_from(int rank) const;
  void refuse();
  void take_in_place();
  bool empty();
  bool answer(std::uint32_t state);

  Group& group_;
  Call call_;
  std::size_t bytes_;
  IntVector<std::uint32_t>& sent_;
  MessageHeader* header_ = nullptr;
  Memory staging_;  // of a send
  int source_ = kAnyRank;
};

}  // namespace lockstep::shm
