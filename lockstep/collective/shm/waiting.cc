#include "lockstep/collective/shm/waiting.h"

#include <sched.h>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {

Waiter::Waiter(const Machine& machine, const Narrator& narrator, std::chrono::milliseconds timeout)
    : machine_(machine),
      narrator_(narrator),
      timeout_(timeout),
      call_timeout_(timeout),
      spins_(machine.more_ranks_than_cores() ? kSpinsWhenCrowded : kSpins),
      yields_(machine.more_ranks_than_cores() ? kYieldsWhenCrowded : kYields) {}

void Waiter::sleep_until(Flag& flag, int peer, const void* call, Predicate done) {
  for (int i = 0; i < yields_; ++i) {
    if (done(call)) return;
    ::sched_yield();
  }
  if (!deadline_) deadline_ = Deadline::after(call_timeout_);
  while (true) {
    const std::uint32_t seen = flag.load();
    if (done(call) || look_around(peer, call, done)) return;
    flag.sleep_while(seen, kLongestSleep);
  }
}

// Throws if this wait can't end well. True if it has ended meanwhile.
bool Waiter::look_around(int peer, const void* call, Predicate done) {
  machine_.poison_if_any_died();
  machine_.throw_if_poisoned(narrator_.here());
  if (cancelled_.load(std::memory_order_relaxed))
    give_up(Cause::kFailed, kNobody, "a group was closed while a collective of it was under way", narrator_.here());
  if (peer != kNobody && machine_.left(peer)) {
    if (done(call)) return true;  // the last thing that it did
    give_up(Cause::kLeft, peer, concat("rank ", peer, " has left, but others still call"), machine_.describe(peer));
  }
  if (deadline_->passed())
    give_up(Cause::kStalled, peer,
            concat(peer == kNobody ? "no rank answered" : concat("rank ", peer, " did not answer"), " within ",
                   human_seconds(std::chrono::duration<double>(call_timeout_).count())),
            narrator_.everyone());
  return false;
}

void Waiter::give_up(Cause cause, int peer, const std::string& what, const std::string& about) {
  machine_.poison(cause, peer, what, about);
  machine_.throw_if_poisoned(narrator_.here());
}

}  // namespace lockstep::shm
