// collective/shm/transfer.h: one send or receive between two ranks, written as steps that never block.
//
// Between each two ranks lie four letters. A sender fills a free one and rings the receiver's bell; the receiver looks
// for its tag among the letters that are there, oldest first, takes the data, answers, and rings the sender's bell.
//
//   up to 832 bytes       in the letter itself: the sender is done at once
//   an arena, or threads  the letter says where: the receiver copies from there
//   other memory          a few chunks in turn in the sender's arena: it fills while the receiver empties
//
// So one thread can have many of them in hand, and a receive that waits does not hold up a send.
//
// Owns:    staging memory of its own, for a large message out of ordinary memory
// Threads: one at a time
// Ranks:   the two that are named
#pragma once

#include <memory>
#include <string>

#include "lockstep/collective/shm/group.h"
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

// `sent` counts the letters to that rank.
std::unique_ptr<Transfer> make_sending(GroupState& group, const Send& call, std::uint32_t& sent);
std::unique_ptr<Transfer> make_receiving(GroupState& group, const Receive& call);

}  // namespace lockstep::shm
