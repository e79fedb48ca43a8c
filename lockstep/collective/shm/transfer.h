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

#include <memory>
#include <string>

#include "lockstep/collective/call.h"
#include "lockstep/collective/shm/group_state.h"

namespace lockstep::shm {

class Transfer {
 public:
  virtual ~Transfer() = default;
  // Goes as far as it can without waiting; true once it is done. Throws MismatchError.
  virtual bool progress() = 0;
  virtual int peer() const = 0;  // kAnyRank: nobody in particular
  virtual std::string describe() const = 0;
  virtual bool holds_up(const Transfer&) const { return false; }  // a later one that must not overtake this one

  int source = kAnyRank;  // of a receive that is done
};

// `sent`: of each rank, how many messages went there so far.
std::unique_ptr<Transfer> make_transfer(GroupState& group, const Call& call, IntVector<std::uint32_t>& sent);

}  // namespace lockstep::shm
