// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/staleness_gate.h"

#include <algorithm>
#include <functional>

namespace lockstep {

std::vector<std::int64_t> StalenessGate::delays_without(int worker) const {
  std::vector<std::int64_t> delays;
  for (int other = 0; other < read_at_.size(); ++other)
    if (read_at_[other] && other != worker) delays.push_back(updates_ - *read_at_[other]);
  std::ranges::sort(delays, std::greater());
  return delays;
}

// The update adds one to every other delay: the state stays safe if the i-th oldest is at most s - i then.
bool StalenessGate::may_update(int worker) const {
  if (bound_ == kUnbounded) return true;
  if (busy_for(worker)) return false;
  for (std::int64_t i = 0; const std::int64_t delay : delays_without(worker))
    if (delay + 1 > bound_ - i++) return false;
  return true;
}

// A new gradient has delay 0 and comes last: with n held before it, safe means 0 <= s - n.
bool StalenessGate::may_read(int worker) const {
  if (bound_ == kUnbounded) return true;
  return !busy_for(worker) && readers_.front() == worker && std::ssize(delays_without(worker)) <= bound_;
}

void StalenessGate::update(int worker) {
  ++updates_;
  read_at_[worker].reset();
  if (several_servers_) updating_ = worker;
}

void StalenessGate::ask_to_read(int worker) {
  readers_.push_back(worker);
  if (updating_ == worker) updating_.reset();
}

void StalenessGate::read(int worker) {
  read_at_[worker] = updates_;
  std::erase(readers_, worker);
}

void StalenessGate::leave(int worker) {
  read_at_[worker].reset();
  std::erase(readers_, worker);
  if (updating_ == worker) updating_.reset();
}

}  // namespace lockstep
