// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/stoppable.h"

#include <mutex>
#include <set>

#include "lockstep/stop_all.h"

namespace lockstep {
namespace {

// Never destroyed: threads that were left behind may outlive static objects.
std::mutex& stoppables_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::set<Stoppable*>& stoppables() {
  static auto* all = new std::set<Stoppable*>;
  return *all;
}

}  // namespace

Stoppable::Stoppable(End end) : end_(std::move(end)) {
  hold_during_fork<std::mutex, stoppables_mutex>();
  const std::lock_guard lock(stoppables_mutex());
  stoppables().insert(this);
}

Stoppable::~Stoppable() {
  const std::lock_guard lock(stoppables_mutex());
  stoppables().erase(this);
}

void stop(const std::string& reason) {
  const std::lock_guard lock(stoppables_mutex());
  for (const Stoppable* each : stoppables())
    if (each->process_.is_here()) each->end_(reason);
}

}  // namespace lockstep
