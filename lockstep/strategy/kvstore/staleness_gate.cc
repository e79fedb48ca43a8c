#include "lockstep/strategy/kvstore/staleness_gate.h"

#include <algorithm>
#include <functional>

namespace lockstep {

std::vector<std::int64_t> StalenessGate::delays_without(int worker) const {
  std::vector<std::int64_t> delays;
  for (std::size_t i = 0; i < read_at_.size(); ++i)
    if (read_at_[i] && static_cast<int>(i) != worker) delays.push_back(updates_ - *read_at_[i]);
  std::ranges::sort(delays, std::greater());
  return delays;
}

bool StalenessGate::may_update(int worker) const {
  if (bound_ == kUnbounded) return true;
  if (busy_for(worker)) return false;
  const auto delays = delays_without(worker);
  for (std::size_t i = 0; i < delays.size(); ++i)
    if (delays[i] + 1 + static_cast<std::int64_t>(i) > bound_) return false;
  return true;
}

bool StalenessGate::may_read(int worker) const {
  if (bound_ == kUnbounded) return true;
  return !busy_for(worker) && readers_.front() == worker &&
         static_cast<std::int64_t>(delays_without(worker).size()) <= bound_;
}

void StalenessGate::update(int worker) {
  ++updates_;
  read_at_[static_cast<std::size_t>(worker)].reset();
  if (several_servers_) under_way_ = worker;
}

void StalenessGate::ask_to_read(int worker) {
  readers_.push_back(worker);
  if (under_way_ == worker) under_way_.reset();
}

void StalenessGate::read(int worker) {
  read_at_[static_cast<std::size_t>(worker)] = updates_;
  std::erase(readers_, worker);
}

void StalenessGate::leave(int worker) {
  read_at_[static_cast<std::size_t>(worker)].reset();
  std::erase(readers_, worker);
  if (under_way_ == worker) under_way_.reset();
}

}  // namespace lockstep
