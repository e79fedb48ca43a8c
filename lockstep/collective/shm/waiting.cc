// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/waiting.h"

#include <sched.h>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

// Ranks that are threads are one process to the launcher.
observe::WaitScope scope_of_wait(const Peers& peers, int peer) {
  if (peer == kNobody) return {peers.shares_ordinary_memory() ? kOwnThread : kAnyPeer, -1};
  const int32_t pid = peers.seat(peer).pid.load(std::memory_order_relaxed);
  return {peers.shares_ordinary_memory() ? kOwnThread : pid, peers.job_rank(peer)};
}

}  // namespace

Waiter::Waiter(const Peers& peers, int rank, const CallDescription& call, milliseconds timeout)
    : peers_(peers),
      rank_(rank),
      call_(call),
      timeout_(timeout),
      call_timeout_(timeout),
      spins_(peers.more_ranks_than_cores() ? kSpinsWhenCrowded : kSpins),
      yields_(peers.more_ranks_than_cores() ? kYieldsWhenCrowded : kYields) {}

// Yields first: where others run on this core, that may take most of the time that this rank waits. The control block tells
// the other ranks of the machine who waits for whom. After an exception it still does: others then don't take this rank for
// the one that holds them up.
void Waiter::sleep_until(Flag& flag, int peer, const Done& done) {
  peers_.note_wait(rank_, peer);
  const observe::WaitScope wait = scope_of_wait(peers_, peer);
  if (!yield_until(done)) {
    if (!deadline_) deadline_ = Deadline::after(call_timeout_);
    sleep_and_look(flag, peer, done, wait);
  }
  peers_.note_wait(rank_, kNobody);
}

bool Waiter::yield_until(const Done& done) const {
  for (int i = 0; i < yields_; ++i) {
    if (done()) return true;
    ::sched_yield();
  }
  return false;
}

// The loop: note that this rank still waits, read the flag, ask, look for trouble, sleep while the flag is what was read. A
// change between the read and the sleep ends the sleep at once (flag.h), so no wake-up is lost.
void Waiter::sleep_and_look(Flag& flag, int peer, const Done& done, const observe::WaitScope& wait) {
  while (true) {
    peers_.note_wait(rank_, peer);
    wait.goes_on();
    const uint32_t seen = flag.load();
    if (done() || look_around(peer, done)) return;
    flag.sleep_while(seen, kLongestSleep);
  }
}

// Throws if this wait can't end well. Returns true if it has ended meanwhile.
bool Waiter::look_around(int peer, const Done& done) {
  peers_.poison_if_any_died();
  if (peers_.poisoned() && done()) return true;  // it came first: a disagreement that the others have seen too
  peers_.throw_if_poisoned(call_.here());
  if (cancelled_.load(std::memory_order_relaxed))
    give_up(Cause::kFailed, "a group was closed while a collective of it was under way", call_.here());
  if (peer != kNobody && peers_.left(peer)) {
    if (done()) return true;  // the last thing that it did
    give_up(Cause::kLeft, concat(peers_.name(peer), " has left, but others still call"), peers_.describe(peer));
  }
  if (deadline_->passed()) give_up_as_stalled(peer);
  return false;
}

// Names the rank that holds up all others, not the one that waits for it too.
void Waiter::give_up_as_stalled(int peer) {
  const int late = peers_.holds_up(peer);
  const std::string longest = human_seconds(call_timeout_);
  if (late == peer)
    give_up(Cause::kStalled,
            concat(peer == kNobody ? "no rank answered" : peers_.name(peer) + " did not answer", " within ", longest),
            call_.everyone());
  else
    give_up(Cause::kStalled,
            concat(peers_.name(late), " held up ", peers_.name(peer), ", which did not answer within ", longest),
            concat(peers_.describe(late), "\n          ", call_.everyone()));
}

void Waiter::give_up(Cause cause, const std::string& what, const std::string& about) {
  peers_.poison(cause, what, about);
  peers_.throw_if_poisoned(call_.here());
}

}  // namespace lockstep::shm
