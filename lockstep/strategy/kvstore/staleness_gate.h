// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/staleness_gate.h: dist_bounded's rule: who may read and who may update now, so that no gradient is
// applied with a delay above the bound s.
//
// Owns:    counters
// Threads: one at a time (the server's lock)
// Ranks:   the first server's: it gates for all of them
//
// Stale synchronous parallel (Ho et al., NeurIPS 2013) bounds how many steps a worker may be ahead; this bounds updates.
// A worker that has read holds an unapplied gradient, whose delay grows by one with every other update. Safe: applied
// oldest first, each would still be within s, so the i-th oldest (from 0) has a delay of at most s - i now.
//
// Reads and updates that would leave the state unsafe wait. In a safe state the oldest gradient may always be applied,
// so the workers that hold one cannot deadlock; once none is held, the first in the queue may read. Reads go in the
// order in which they were asked for. With s = 0 workers take turns; with s >= workers - 1 no read waits.
//
// With several servers an update is in progress from update() until its worker asks to read: only then every server has
// applied it. Meanwhile nobody else is let through, so that all servers apply updates in one order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "lockstep/base/int_vector.h"

namespace lockstep {

class StalenessGate {
 public:
  static constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

  StalenessGate(int workers, int64_t bound, bool several_servers = false)
      : bound_(bound), several_servers_(several_servers), read_at_(workers) {}

  // The update adds one to every other delay: the state stays safe if the i-th oldest is at most s - i then.
  bool may_update(int worker) const {
    if (bound_ == kUnbounded) return true;
    if (busy_for(worker)) return false;
    for (int64_t i = 0; const int64_t delay : delays_without(worker))
      if (delay + 1 > bound_ - i++) return false;
    return true;
  }

  // It has asked. A new gradient has delay 0 and comes last: with n held before it, safe means 0 <= s - n.
  bool may_read(int worker) const {
    if (bound_ == kUnbounded) return true;
    return !busy_for(worker) && readers_.front() == worker && std::ssize(delays_without(worker)) <= bound_;
  }

  void update(int worker) {
    ++updates_;
    read_at_[worker].reset();
    if (several_servers_) updating_ = worker;
  }

  void ask_to_read(int worker) {
    readers_.push_back(worker);
    if (updating_ == worker) updating_.reset();
  }

  void read(int worker) {
    read_at_[worker] = updates_;
    std::erase(readers_, worker);
  }

  // Its gradient will not be applied.
  void drop(int worker) { read_at_[worker].reset(); }

  void leave(int worker) {
    drop(worker);
    std::erase(readers_, worker);
    if (updating_ == worker) updating_.reset();
  }

 private:
  bool busy_for(int worker) const { return updating_ && *updating_ != worker; }

  std::vector<int64_t> delays_without(int worker) const {  // the oldest first
    std::vector<int64_t> delays;
    for (int other = 0; other < read_at_.size(); ++other)
      if (read_at_[other] && other != worker) delays.push_back(updates_ - *read_at_[other]);
    std::ranges::sort(delays, std::greater());
    return delays;
  }

  int64_t bound_;
  bool several_servers_;
  int64_t updates_ = 0;
  IntVector<std::optional<int64_t>> read_at_;  // [worker] updates_ when it read; none: it holds no gradient
  std::deque<int> readers_;                    // workers that asked to read, in order
  std::optional<int> updating_;                // whose update other servers may not have applied yet
};

}  // namespace lockstep
