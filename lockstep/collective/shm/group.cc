// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/group.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/collectives.h"
#include "lockstep/collective/shm/group_state.h"
#include "lockstep/collective/shm/mailbox.h"
#include "lockstep/error.h"
#include "lockstep/observe/trace.h"

namespace lockstep::shm {

// Destroyed in reverse order: first the mailbox, whose thread uses the rest.
struct Group::Parts {
  Parts(std::shared_ptr<Machine> machine, GroupArea area, std::vector<int> ranks, int rank,
        std::chrono::milliseconds timeout)
      : state(std::move(machine), area, std::move(ranks), rank, timeout), mailbox(state, timeout) {}

  bool is_subgroup = false;
  Memory area_memory;  // of a sub-group, at its rank 0
  bool left = false;
  GroupState state;
  Mailbox mailbox;
};

namespace {

void carry_out(GroupState& state, const Call& call) {
  switch (call.operation) {
    case Operation::kAllReduce:
      if (call.algorithm != Algorithm::kDirect) return all_reduce_reference(state, call);
      [[fallthrough]];
    case Operation::kReduce:
    case Operation::kReduceScatter: return all_reduce(state, call);
    case Operation::kAllGather:
    case Operation::kGather: return gather(state, call);
    case Operation::kBroadcast: return broadcast(state, call);
    case Operation::kScatter: return scatter(state, call);
    case Operation::kAllToAll: return all_to_all(state, call);
    default: return barrier(state);
  }
}

// How a trace shows a collective. Messages are shown by World.
trace::Event label_of(const Signature& signature) {
  static constexpr std::array kPhases{"barrier 1: gradients",  "barrier 2: settings", "barrier: norms",
                                      "barrier: trust ratios", "barrier 3: updated",  "barrier: written"};
  const bool of_step = signature.operation == Operation::kStep;
  const auto bytes = static_cast<std::int64_t>(signature.count * size_of(signature.dtype));
  return {.name = of_step ? kPhases.at(static_cast<unsigned>(signature.root)) : to_string(signature.operation),
          .bytes = of_step || bytes == 0 ? -1 : bytes};
}

// What a rank of a group says about the sub-group that it wants to be in.
struct Offer {
  std::uint64_t offset = 0;  // of the control memory, in the arena of the sub-group's rank 0
  std::vector<int> ranks;
};

// A rank sends size + 1 numbers: the offset, its list, then -1.
IntVector<Offer> exchange_offers(GroupState& group, const Offer& mine) {
  const int words = group.size() + 1;
  IntVector<std::int64_t> sent(words, -1);
  IntVector<std::int64_t> received(words * group.size());
  sent[0] = static_cast<std::int64_t>(mine.offset);
  std::ranges::copy(mine.ranks, sent.begin() + 1);
  gather(group, {.operation = Operation::kSubgroup,
                 .input = sent.data(),
                 .output = received.data(),
                 .count = sent.elements().size(),
                 .dtype = DType::kInt64});
  IntVector<Offer> offers(group.size());
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto begin = received.begin() + rank * words;
    offers[rank] = {static_cast<std::uint64_t>(*begin), {begin + 1, std::find(begin + 1, begin + words, -1)}};
  }
  return offers;
}

void check_offers(const GroupState& group, const IntVector<Offer>& offers) {
  const auto list = [&](int rank) { return concat("ranks ", join(offers[rank].ranks, ", ")); };
  for (int rank = 0; rank < group.size(); ++rank)
    for (const int member : offers[rank].ranks)
      if (offers[member].ranks != offers[rank].ranks)
        throw MismatchError({.what = concat("rank ", rank, " wants a sub-group of ", list(rank), ", rank ", member,
                                            " one of ", list(member)),
                             .here = group.here(),
                             .likely = "ranks that compute their groups from different numbers",
                             .next = "give the same list on all its ranks; other lists may not overlap it"});
}

Memory make_area(GroupState& state, int size) {
  const std::size_t bytes = GroupArea::bytes(size);
  Memory memory = state.allocate(bytes);
  std::memset(memory.data(), 0, bytes);
  memory.as<GroupHeader>()->users.store(static_cast<unsigned>(size));
  return memory;
}

}  // namespace

Group::Group(std::shared_ptr<Machine> machine, int rank, std::chrono::milliseconds timeout) {
  std::vector<int> ranks(static_cast<unsigned>(machine->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const GroupArea area = machine->group_area();
  parts_ = std::make_unique<Parts>(std::move(machine), area, std::move(ranks), rank, timeout);
}

Group::Group(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Group::Group(Group&&) noexcept = default;

Group& Group::operator=(Group&& other) noexcept {
  Group(std::move(other)).parts_.swap(parts_);
  return *this;
}

Group::~Group() {
  if (parts_ == nullptr || is_parents()) return;
  cancel();
  const std::shared_ptr<Machine> machine = parts_->state.shared_machine();
  const GroupArea area = parts_->state.area();
  const bool is_subgroup = parts_->is_subgroup;
  Memory area_memory = std::move(parts_->area_memory);
  parts_.reset();
  if (is_subgroup) area.header().users.fetch_sub(1);
  if (area_memory.data() != nullptr) machine->retire(std::move(area_memory));
}

void Group::cancel() {
  if (is_parents()) return;
  if (!parts_->is_subgroup && !parts_->left) poison("it went away without leave(), after an error or by mistake");
  parts_->state.waiter().cancel();
}

void Group::leave() {
  if (is_parents()) return;
  parts_->mailbox.drain();
  parts_->left = true;
  const GroupState& state = parts_->state;
  if (!parts_->is_subgroup) state.machine().seat(state.machine_rank(state.rank())).state.store(Seat::kLeft);
}

// Whatever a child announced, the other ranks would take for its parent's.
void Group::require_own_process() const {
  if (!is_parents()) return;
  throw UsageError({.what = "a collective or message in a forked child of a rank",
                    .here = parts_->state.here(),
                    .likely = "fork() after World was made: the child is not a rank",
                    .next = "leave collectives, backward() and step() to the parent"});
}

int Group::rank() const { return parts_->state.rank(); }
int Group::size() const { return parts_->state.size(); }
int Group::job_rank(int rank) const { return parts_->state.job_rank(rank); }

void Group::set_timeout(std::chrono::milliseconds timeout) {
  parts_->state.waiter().set_timeout(timeout);
  parts_->mailbox.set_timeout(timeout);
}

Memory Group::allocate(std::size_t bytes) {
  require_own_process();
  return parts_->state.allocate(bytes);
}

int Group::memory_file() const {
  const GroupState& state = parts_->state;
  return state.machine().arena(state.machine_rank(state.rank()))->window().fd();
}

std::byte* Group::peer_memory(int rank, std::uint64_t offset, std::size_t bytes) {
  return parts_->state.pointer(place_in(parts_->state.machine_rank(rank), offset), bytes);
}

Place Group::locate(const void* address, std::size_t bytes) const { return parts_->state.locate(address, bytes); }

int Group::run(const Call& call) {
  require_own_process();
  check_call(call, size());
  if (is_message(call.operation)) return parts_->mailbox.run(call);
  const trace::Span span([&] { return label_of(parts_->state.announced_as().value_or(signature_of(call))); });
  parts_->state.run(call.timeout, [&] { carry_out(parts_->state, call); });
  return kAnyRank;
}

void Group::run_as(const Signature& announced, const Call& call) {
  require_own_process();
  check_call(call, size());  // if this throws, nothing must be left to announce
  parts_->state.announce_as(announced);
  run(call);
}

FuturePtr Group::start(const Call& message) {
  require_own_process();
  check_call(message, size());
  return parts_->mailbox.start(message);
}

std::optional<Group> Group::subgroup(const std::vector<int>& ranks) {
  require_own_process();
  check_subgroup(ranks, size());
  GroupState& state = parts_->state;
  const int new_size = static_cast<int>(ranks.size());
  const int new_rank = static_cast<int>(std::ranges::find(ranks, rank()) - ranks.begin());
  IntVector<Offer> offers;
  Memory area;
  state.run({}, [&] {
    if (new_rank == 0) area = make_area(state, new_size);
    offers = exchange_offers(state, {area.offset(), ranks});
    check_offers(state, offers);
  });
  if (new_rank == new_size) return std::nullopt;
  std::byte* const base = peer_memory(ranks.front(), offers[ranks.front()].offset, GroupArea::bytes(new_size));
  std::vector<int> machine_ranks;
  for (const int rank : ranks) machine_ranks.push_back(state.machine_rank(rank));
  auto parts = std::make_unique<Parts>(state.shared_machine(), GroupArea(base, new_size), std::move(machine_ranks),
                                       new_rank, state.waiter().timeout());
  parts->is_subgroup = true;
  parts->area_memory = std::move(area);
  return Group(std::move(parts));
}

void Group::poison(const std::string& reason) {
  if (is_parents()) return;
  const GroupState& state = parts_->state;
  const int rank = state.machine_rank(state.rank());
  state.machine().poison_if_any_died();  // then this rank failed for that reason
  state.machine().poison(Cause::kFailed, concat(state.machine().name(rank), " failed: ", reason),
                         state.machine().describe(rank));
}

void Group::throw_if_lost() const {
  if (is_parents()) return;
  const GroupState& state = parts_->state;
  state.machine().poison_if_any_died();
  state.machine().throw_if_poisoned(concat("rank ", job_rank(rank())));
}

}  // namespace lockstep::shm
