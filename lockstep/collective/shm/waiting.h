// SPDX-License-Identifier: Apache-2.0
// collective/shm/waiting.h: how a rank waits for another: it spins briefly, yields, then sleeps in slices of 10 ms;
// between slices it checks for dead peers, poison and its deadline.
//
// Flow:    a Flag of a peer -> here -> the collective goes on, or PeerLost
// Owns:    the deadline of the call under way
// Threads: one thread at a time; cancel() from any
// Ranks:   a rank that gives up poisons the machine, so that all others give up within one slice
#pragma once

#include <functional>

#include "lockstep/collective/shm/connect/peers.h"
#include "lockstep/observe/rank_progress.h"

namespace lockstep::shm {

// Says who waits and where. Only asked when something is wrong.
class CallDescription {
 public:
  virtual std::string here() const = 0;      // "rank 0 of 4 in all_reduce of 100 float32 (sum)"
  virtual std::string everyone() const = 0;  // a line per rank: what it is doing

 protected:
  ~CallDescription() = default;
};

inline constexpr int kNobody = -1;

class Waiter {
 public:
  Waiter(const Peers& peers, int rank, const CallDescription& call, milliseconds timeout);

  milliseconds timeout() const { return timeout_; }
  void set_timeout(milliseconds timeout) { timeout_ = timeout; }

  // The deadline starts anew with the first wait of this call that has to sleep: a call that finds all it
  // waits for while it spins does not read the clock. `timeout`: of this call only; 0: the one set for all.
  void begin_call(milliseconds timeout = {}) {
    observe::moved();
    call_timeout_ = timeout.count() > 0 ? timeout : timeout_;
    deadline_.reset();
  }
  void begin_call(Deadline deadline) {
    begin_call();
    deadline_ = deadline;
  }

  // Returns once done() is true, and does not ask again. `flag` changes when that may have become so. `peer`: the rank of
  // the machine that has to do something, or kNobody in particular. Throws PeerLost: a rank died, left, failed or is too
  // late.
  template <class Predicate>
  void until(Flag& flag, int peer, const Predicate& done) {
    for (int i = 0; i < spins_; ++i) {
      if (done()) return;
      pause();
    }
    sleep_until(flag, peer, std::cref(done));
  }

  // Ends a wait under way, and every later one, with PeerLost: its group is being closed.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

 private:
  using Done = std::function<bool()>;  // made only once spinning was in vain

  void sleep_until(Flag& flag, int peer, const Done& done);
  bool yield_until(const Done& done) const;
  void sleep_and_look(Flag& flag, int peer, const Done& done, const observe::WaitScope& wait);
  bool look_around(int peer, const Done& done);
  void give_up_as_stalled(int peer);
  void give_up(Cause cause, const std::string& what, const std::string& about);

  const Peers& peers_;
  int rank_;  // of the machine
  const CallDescription& call_;
  milliseconds timeout_;
  milliseconds call_timeout_;
  std::optional<Deadline> deadline_;
  std::atomic<bool> cancelled_{false};
  int spins_;
  int yields_;
};

}  // namespace lockstep::shm
