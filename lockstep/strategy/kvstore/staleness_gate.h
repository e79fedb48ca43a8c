// strategy/kvstore/staleness_gate.h: who may update and who may read, so that no gradient gets older than a bound.
//
// Owns:    counters
// Threads: one at a time (the server's lock)
// Ranks:   the first server's: it gates for all of them
//
// A worker that has read holds a gradient in the making, whose delay grows with every update made elsewhere. The
// state is safe as long as all of these could still be applied one after another, the oldest first, none with a delay
// above the bound s: the i-th oldest (from 0) has a delay of at most s - i now. Only updates and reads that leave the
// state safe are let through; the others wait, to read in the order in which they asked. The oldest may always update, so
// somebody always can go on. With s = 0 workers take turns; with s >= workers - 1 nobody waits to read. S2: between
// dist_sync and dist_async.
//
// With several servers an update is under way from its worker's update() until that worker asks to read, when all
// servers have it: meanwhile nobody else is let through, so that no server sees another order.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <vector>

namespace lockstep {

class StalenessGate {
 public:
  static constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

  StalenessGate(int workers, std::int64_t bound, bool several_servers = false)
      : bound_(bound), several_servers_(several_servers), read_at_(static_cast<std::size_t>(workers)) {}

  bool may_update(int worker) const;
  void update(int worker);
  void ask_to_read(int worker);
  bool may_read(int worker) const;  // it has asked
  void read(int worker);
  void leave(int worker);  // it will not use what it has read

 private:
  bool busy_for(int worker) const { return under_way_ && *under_way_ != worker; }
  std::vector<std::int64_t> delays_without(int worker) const;  // the oldest first

  std::int64_t bound_;
  bool several_servers_;
  std::int64_t updates_ = 0;
  std::vector<std::optional<std::int64_t>> read_at_;  // worker by worker; none: it holds nothing
  std::deque<int> readers_;                           // who has asked to read
  std::optional<int> under_way_;                      // whose update other servers may not have yet
};

}  // namespace lockstep
