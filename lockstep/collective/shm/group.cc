// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/group.h"

#include <sched.h>

#include <numeric>

#include "lockstep/collective/shm/mailbox.h"
#include "lockstep/observe/trace.h"

namespace lockstep::shm {
namespace {

// Labels a collective in a trace. Messages are shown by World.
trace::Event label_of(const Signature& signature) {
  static constexpr std::array kPhases{
      "barrier 1: gradients", "barrier: no gradient is written", "barrier: mean",      "barrier 2: settings",
      "barrier: norms",       "barrier: trust ratios",           "barrier 3: updated", "barrier: written"};
  static_assert(kPhases.size() == static_cast<unsigned>(StepPhase::kParametersWritten) + 1);
  const bool of_step = signature.operation == Operation::kStep;
  const auto bytes = to_int64(signature.count * size_of(signature.dtype));
  return {.name = of_step ? kPhases.at(static_cast<unsigned>(signature.root)) : to_string(signature.operation),
          .bytes = of_step || bytes == 0 ? -1 : bytes};
}

}  // namespace

Memory make_shared_memory(const Group& group, size_t bytes, int users) {
  Memory memory = group.allocate(bytes);
  std::memset(memory.data(), 0, bytes);
  memory.as<SharedHeader>()->users.store(static_cast<unsigned>(users));
  return memory;
}

Group::Group(std::shared_ptr<Peers> peers, GroupArea area, std::vector<int> ranks, int rank, milliseconds timeout)
    : sources(to_int(ranks.size())),
      destinations(sources.size()),
      lines(sources.size()),
      peers_(std::move(peers)),
      area_(area),
      ranks_(std::move(ranks)),
      rank_(rank),
      waiter_(*peers_, ranks_[rank_], *this, timeout),
      mailbox_(std::make_unique<Mailbox>(*this, timeout)) {}

GroupPtr Group::of_all(const std::shared_ptr<Peers>& peers, int rank, milliseconds timeout) {
  std::vector<int> ranks(to_size(peers->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return {new Group(peers, peers->group_area(), std::move(ranks), rank, timeout), DeleteInOwnProcess()};
}

Group::~Group() {
  cancel();
  mailbox_.reset();
  if (is_subgroup_) area_.header().users.fetch_sub(1);
  if (area_memory_.data() != nullptr) peers_->retire(std::move(area_memory_));
}

void Group::cancel() {
  if (is_parents()) return;
  if (!is_subgroup_ && !left_) poison("it ended without leave(), after an error or by mistake");
  waiter_.cancel();
}

void Group::leave() {
  if (is_parents()) return;
  mailbox_->drain();
  left_ = true;
  if (!is_subgroup_) peers_->seat(ranks_[rank_]).left.store(true);
}

// The other ranks would take whatever a child announced for its parent's.
void Group::require_own_process() const {
  if (is_parents()) refuse_forked_child(self());
}

void Group::set_timeout(milliseconds timeout) {
  waiter_.set_timeout(timeout);
  mailbox_->set_timeout(timeout);
}

Memory Group::allocate(size_t bytes) const {
  require_own_process();
  return peers_->arena(ranks_[rank_])->allocate(bytes);
}

int Group::memory_file() const { return peers_->arena(ranks_[rank_])->window().fd(); }

// ---- Calls

int Group::run(const Call& call, const Signature* announced) {
  require_own_process();
  check_call(call, size());
  if (is_message(call.operation)) return mailbox_->run(call);
  const Signature signature = announced != nullptr ? *announced : signature_of(call);
  const trace::Span span([&] { return label_of(signature); });
  waiter_.begin_call(call.timeout);
  try {
    begin(signature);
    switch (call.operation) {
      case Operation::kAllReduce:
      case Operation::kReduce:
      case Operation::kReduceScatter: shm::all_reduce(*this, call); break;
      case Operation::kAllGather:
      case Operation::kGather:
      case Operation::kSubgroup: shm::gather(*this, call); break;
      case Operation::kBroadcast: shm::broadcast(*this, call); break;
      case Operation::kScatter: shm::scatter(*this, call); break;
      case Operation::kAllToAll: shm::all_to_all(*this, call); break;
      default: announce({.kind = Location::kSlot}, {}); arrive();
    }
  } catch (...) {
    after_failure();
    throw;
  }
  return kAnyRank;
}

FuturePtr Group::start(const Call& message) {
  require_own_process();
  check_call(message, size());
  return mailbox_->start(message);
}

// Its rank 0 takes memory for the control area in its arena; all ranks tell each other where.
GroupPtr Group::subgroup(const std::vector<int>& ranks) {
  require_own_process();
  const int new_size = to_int(ranks.size());
  const int new_rank = index_of(ranks, rank_);
  Memory area;
  if (new_size > 0 && new_rank == 0) try {
      area = make_shared_memory(*this, GroupArea::bytes(new_size), new_size);
    } catch (...) {
      after_failure();
      throw;
    }
  const uint64_t mine = area.data() != nullptr ? area.offset() : 0;
  IntVector<uint64_t> offsets(size());
  run({.operation = Operation::kSubgroup,
       .input = &mine,
       .output = offsets.data(),
       .count = 1,
       .dtype = DType::kInt64});
  if (new_size == 0) return nullptr;
  std::byte* const base = peer_memory(ranks.front(), offsets[ranks.front()], GroupArea::bytes(new_size));
  std::vector<int> machine_ranks;
  for (const int rank : ranks) machine_ranks.push_back(ranks_[rank]);
  const GroupPtr made(
      new Group(peers_, GroupArea(base, new_size), std::move(machine_ranks), new_rank, waiter_.timeout()),
      DeleteInOwnProcess());
  made->is_subgroup_ = true;
  made->area_memory_ = std::move(area);
  return made;
}

void Group::poison(const std::string& reason) const {
  if (is_parents()) return;
  const int rank = ranks_[rank_];
  peers_->poison_if_any_died();  // then this rank failed for that reason
  peers_->poison(Cause::kFailed, concat(peers_->name(rank), " failed: ", reason), peers_->describe(rank));
}

void Group::throw_if_lost() const {
  if (is_parents()) return;
  peers_->poison_if_any_died();
  peers_->throw_if_poisoned(name(rank_));
}

// ---- Steps of a collective

void Group::begin(const Signature& signature) {
  if (peers_->poisoned()) peers_->throw_if_poisoned(here());
  signature_ = signature;
  ++sequence_;
}

void Group::announce(Location input, Location output, size_t longest_message) {
  area_.announcement(rank_, sequence_).write(signature_, input, output, longest_message);
}

void Group::announce_line(const std::byte* data, size_t bytes) {
  area_.announcement(rank_, sequence_).write_line(signature_, data, bytes);
}

void Group::arrive() {
  area_.announcement(rank_, sequence_).arrived.raise(sequence_);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    Flag& arrived = area_.announcement(peer, sequence_).arrived;
    if (arrived.load() == sequence_) continue;
    waiter_.until(arrived, ranks_[peer], [&] { return arrived.load() == sequence_; });
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    const Signature theirs = announcement(peer).read_signature();
    if (theirs != signature_) disagree(peer, to_string(signature_), to_string(theirs));
  }
}

void Group::disagree(int peer, const std::string& mine, const std::string& theirs) const {
  throw MismatchError({.what = concat(name(rank_), " wants ", mine, ", ", name(peer), " wants ", theirs),
                       .here = here(),
                       .peer = peers_->describe(ranks_[peer]),
                       .likely = "ranks whose models, batches or branches differ, so that their calls do too",
                       .next = "make every rank call the same collectives in the same order with the same shapes"});
}

void Group::wait(uint32_t step, int only) {
  const uint32_t target = phase_ + step;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_ || (only != kAnyRank && peer != only)) continue;
    Flag& phase = area_.progress(peer).phase;
    waiter_.until(phase, ranks_[peer], [&] { return phase.reached(target); });
  }
}

void Group::finish(uint32_t steps) {
  post(steps);
  wait(steps);
  end(steps);
}

void Group::make_staging() {
  if (staging_.data() != nullptr) return;
  staging_ = allocate(kStagingChunks * staging_bytes());
  area_.progress(rank_).staging.store(staging_.offset(), std::memory_order_relaxed);
}

std::byte* Group::staging(int rank, size_t chunk) const {
  const Location location = in_arena(ranks_[rank], area_.progress(rank).staging.load(std::memory_order_relaxed));
  return pointer(location, kStagingChunks * staging_bytes()) + chunk % kStagingChunks * staging_bytes();
}

// A peer may still be reading or writing memory of this rank that the caller frees when it sees the exception. The
// machine is poisoned by now, so no further access starts; this waits for those under way.
void Group::after_failure() const {
  try {
    throw;
  } catch (const MismatchError&) {
    return;
  } catch (const PeerLost&) {
  } catch (const std::exception& error) {
    peers_->poison(Cause::kFailed, concat(name(rank_), " failed"), error.what());
  }
  for (int peer = 0; peer < size() && peers_->shares_ordinary_memory(); ++peer)
    while (area_.progress(peer).accesses.load() != 0) ::sched_yield();
}

Group::PeerAccess::PeerAccess(const Group& group) : group_(group) {
  if (!group_.peers_->shares_ordinary_memory()) return;
  std::atomic<uint32_t>& accesses = group_.area_.progress(group_.rank_).accesses;
  accesses.fetch_add(1);  // sequentially consistent, as is the poisoning: either it is seen here, or this is waited for
  if (!group_.peers_->poisoned()) return;
  accesses.fetch_sub(1);
  group_.peers_->throw_if_poisoned(group_.here());
}

Group::PeerAccess::~PeerAccess() {
  if (group_.peers_->shares_ordinary_memory())
    group_.area_.progress(group_.rank_).accesses.fetch_sub(1, std::memory_order_release);
}

std::string Group::self() const {
  const int known_as = job_rank(rank_);
  return concat("rank ", rank_, " of ", size(), known_as == rank_ ? "" : concat(" (rank ", known_as, " of the job)"));
}

std::string Group::here() const { return concat(self(), " in ", to_string(signature_), ", collective ", sequence_); }

std::string Group::everyone() const {
  std::vector<std::string> all;
  for (int rank = 0; rank < size(); ++rank) all.push_back(doing(rank));
  return join(all, "\n          ");
}

const Announcement& Group::last_of(int rank) const {
  const Announcement& one = area_.announcement(rank, 0);
  const Announcement& other = area_.announcement(rank, 1);
  return one.arrived.reached(other.arrived.load()) ? one : other;
}

std::string Group::doing(int rank) const {
  const std::string who = peers_->describe(ranks_[rank]);
  const Announcement& last = last_of(rank);
  const uint32_t number = last.arrived.load();
  if (number == 0) return who + ": no collective yet";
  const uint32_t here = last_of(rank_).arrived.load();
  return concat(who, ": ", to_string(last.read_signature()), ", collective ", number,
                number == here ? "" : concat(" (this rank: ", here, ")"));
}

}  // namespace lockstep::shm
