// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/group_state.h"

#include <sched.h>

#include <exception>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/thresholds.h"
#include "lockstep/error.h"

namespace lockstep::shm {

GroupState::GroupState(std::shared_ptr<Machine> machine, GroupArea area, std::vector<int> ranks, int rank,
                       std::chrono::milliseconds timeout)
    : machine_(std::move(machine)),
      area_(area),
      ranks_(std::move(ranks)),
      rank_(rank),
      waiter_(*machine_, ranks_[rank_], *this, timeout) {
  sources.resize(size());
  destinations.resize(size());
  lines.resize(size());
}

void GroupState::begin(const Signature& signature) {
  if (machine_->poisoned()) machine_->throw_if_poisoned(here());
  signature_ = announced_as_.value_or(signature);
  announced_as_.reset();
  ++sequence_;
}

void GroupState::arrive(Place input, Place output, std::size_t longest_message) {
  area_.announcement(rank_, sequence_).write(signature_, input, output, longest_message);
  wait_for_arrivals();
}

void GroupState::arrive_with(const std::byte* data, std::size_t bytes) {
  area_.announcement(rank_, sequence_).write_line(signature_, data, bytes);
  wait_for_arrivals();
}

void GroupState::wait_for_arrivals() {
  area_.announcement(rank_, sequence_).arrived.raise(sequence_);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    Flag& arrived = area_.announcement(peer, sequence_).arrived;
    if (arrived.load() == sequence_) continue;
    waiter_.until(arrived, machine_rank(peer), [&] { return arrived.load() == sequence_; });
  }
  compare_signatures();
}

void GroupState::compare_signatures() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    const Signature theirs = announcement(peer).read_signature();
    if (theirs != signature_) disagree(peer, to_string(signature_), to_string(theirs));
  }
}

void GroupState::disagree(int peer, const std::string& mine, const std::string& theirs) const {
  throw MismatchError({.what = concat(name(rank_), " wants ", mine, ", ", name(peer), " wants ", theirs),
                       .here = here(),
                       .peer = machine_->describe(machine_rank(peer)),
                       .likely = "ranks whose models, batches or branches differ, so that their calls do too",
                       .next = "make every rank call the same collectives in the same order with the same shapes"});
}

void GroupState::wait_for(int peer, std::uint32_t step) {
  Flag& phase = area_.progress(peer).phase;
  const std::uint32_t target = phase_ + step;
  waiter_.until(phase, machine_rank(peer), [&] { return phase.reached(target); });
}

void GroupState::wait_all(std::uint32_t step) {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank_) wait_for(peer, step);
}

void GroupState::make_staging() {
  if (staging_.data() != nullptr) return;
  staging_ = allocate(kStagingChunks * staging_bytes());
  area_.progress(rank_).staging.store(staging_.offset(), std::memory_order_relaxed);
}

std::byte* GroupState::staging(int rank, std::size_t chunk) const {
  const Place place = place_in(machine_rank(rank), area_.progress(rank).staging.load(std::memory_order_relaxed));
  return machine_->pointer(place, kStagingChunks * staging_bytes()) + chunk % kStagingChunks * staging_bytes();
}

// A peer may still be reading or writing memory of this rank that the caller frees when it sees the exception. The
// machine is poisoned by now, so no further access starts; this waits for those under way.
void GroupState::after_failure() const {
  try {
    throw;
  } catch (const MismatchError&) {
    return;
  } catch (const PeerLost&) {
  } catch (const std::exception& error) {
    machine_->poison(Cause::kFailed, concat(name(rank_), " failed"), error.what());
  }
  for (int peer = 0; peer < size() && machine_->shares_ordinary_memory(); ++peer)
    while (area_.progress(peer).accesses.load() != 0) ::sched_yield();
}

GroupState::PeerAccess::PeerAccess(const GroupState& group) : group_(group) {
  if (!group_.machine_->shares_ordinary_memory()) return;
  std::atomic<std::uint32_t>& accesses = group_.area_.progress(group_.rank_).accesses;
  accesses.fetch_add(1);  // sequentially consistent, as is the poisoning: either it is seen here, or this is waited for
  if (!group_.machine_->poisoned()) return;
  accesses.fetch_sub(1);
  group_.machine_->throw_if_poisoned(group_.here());
}

GroupState::PeerAccess::~PeerAccess() {
  if (group_.machine_->shares_ordinary_memory())
    group_.area_.progress(group_.rank_).accesses.fetch_sub(1, std::memory_order_release);
}

std::string GroupState::self() const {
  const int known_as = job_rank(rank_);
  return concat("rank ", rank_, " of ", size(), known_as == rank_ ? "" : concat(" (rank ", known_as, " of the job)"));
}

std::string GroupState::here() const {
  return concat(self(), " in ", to_string(signature_), ", collective ", sequence_);
}

std::string GroupState::everyone() const {
  std::vector<std::string> all;
  for (int rank = 0; rank < size(); ++rank) all.push_back(doing(rank));
  return join(all, "\n          ");
}

const Announcement& GroupState::last_of(int rank) const {
  const Announcement& one = area_.announcement(rank, 0);
  const Announcement& other = area_.announcement(rank, 1);
  return one.arrived.reached(other.arrived.load()) ? one : other;
}

std::string GroupState::doing(int rank) const {
  const std::string who = machine_->describe(machine_rank(rank));
  const Announcement& last = last_of(rank);
  const std::uint32_t number = last.arrived.load();
  if (number == 0) return who + ": no collective yet";
  const std::uint32_t here = last_of(rank_).arrived.load();
  return concat(who, ": ", to_string(last.read_signature()), ", collective ", number,
                number == here ? "" : concat(" (this rank: ", here, ")"));
}

}  // namespace lockstep::shm
