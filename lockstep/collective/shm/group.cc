#include "lockstep/collective/shm/group.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/algorithms.h"
#include "lockstep/collective/shm/check_call.h"
#include "lockstep/collective/shm/connect/group_factory.h"
#include "lockstep/collective/shm/exchange.h"
#include "lockstep/collective/shm/group_state.h"
#include "lockstep/collective/shm/mailbox.h"
#include "lockstep/collective/shm/reduction.h"
#include "lockstep/collective/shm/work.h"
#include "lockstep/error.h"

namespace lockstep::shm {

// Members go in reverse order: first the threads that use the rest.
struct Group::Parts {
  Parts(std::shared_ptr<Machine> machine, GroupArea area, std::vector<int> ranks, int rank,
        std::chrono::milliseconds wait)
      : timeout(wait), state(std::move(machine), area, std::move(ranks), rank, wait), mailbox(state, wait) {}

  bool is_whole_machine() const { return area_memory.data() == nullptr && !borrowed_area; }

  std::chrono::milliseconds timeout;
  Memory area_memory;          // of a sub-group, at its rank 0
  bool borrowed_area = false;  // of a sub-group, at its other ranks
  bool left = false;
  GroupState state;
  Mailbox mailbox;
  Worker worker;
};

namespace {

void make_call(GroupState& state, const AllReduce& call) {
  switch (call.algorithm) {
    case Algorithm::kDirect: return all_reduce(state, call);
    case Algorithm::kCentral: return all_reduce_central(state, call);
    case Algorithm::kRing: return all_reduce_ring(state, call);
    case Algorithm::kTree: return all_reduce_tree(state, call);
  }
}
void make_call(GroupState& state, const Barrier&) { barrier(state); }
void make_call(GroupState& state, const Reduce& call) { reduce(state, call); }
void make_call(GroupState& state, const ReduceScatter& call) { reduce_scatter(state, call); }
void make_call(GroupState& state, const AllGather& call) { all_gather(state, call); }
void make_call(GroupState& state, const Broadcast& call) { broadcast(state, call); }
void make_call(GroupState& state, const Gather& call) { gather(state, call); }
void make_call(GroupState& state, const Scatter& call) { scatter(state, call); }
void make_call(GroupState& state, const AllToAll& call) { all_to_all(state, call); }

template <class Type>
constexpr bool kIsMessage = std::is_same_v<Type, Send> || std::is_same_v<Type, Receive>;

// What each rank of a group says about the sub-group that it wants to be in: `words` numbers, the first of which is the
// offset of the control memory in the arena of the sub-group's rank 0.
class SubgroupOffers {
 public:
  SubgroupOffers(int size, const std::vector<int>& ranks)
      : words_(static_cast<std::size_t>(size) + 1), mine_(words_, -1), all_(words_ * static_cast<std::size_t>(size)) {
    std::copy(ranks.begin(), ranks.end(), mine_.begin() + 1);
  }

  void exchange(GroupState& group, std::uint64_t offset) {
    mine_[0] = static_cast<std::int64_t>(offset);
    gather_for_subgroup(group, mine_.data(), all_.data(), words_ * sizeof(std::int64_t));
    for (int rank = 0; rank < group.size(); ++rank)
      for (const int member : list_of(rank))
        if (list_of(member) != list_of(rank)) disagree(group, rank, member);
  }

  std::uint64_t offset_from(int rank) const { return static_cast<std::uint64_t>(all_[at(rank)]); }

 private:
  std::size_t at(int rank) const { return static_cast<std::size_t>(rank) * words_; }

  std::vector<int> list_of(int rank) const {
    std::vector<int> list;
    for (std::size_t i = 1; i < words_ && all_[at(rank) + i] >= 0; ++i)
      list.push_back(static_cast<int>(all_[at(rank) + i]));
    return list;
  }

  [[noreturn]] void disagree(const GroupState& group, int one, int other) const {
    throw MismatchError({.what = concat("rank ", one, " wants a sub-group of ", text_of(one), ", rank ", other,
                                        " one of ", text_of(other)),
                         .here = group.here(),
                         .likely = "ranks that compute their groups from different numbers",
                         .next = "give the same list on all its ranks; other lists may not overlap it"});
  }

  std::string text_of(int rank) const {
    std::vector<std::string> names;
    for (const int member : list_of(rank)) names.push_back(std::to_string(member));
    return "ranks " + join(names, ", ");
  }

  std::size_t words_;
  std::vector<std::int64_t> mine_;
  std::vector<std::int64_t> all_;
};

Memory make_area(GroupState& state, int size) {
  const std::size_t bytes = GroupArea::bytes(size);
  Memory memory = state.machine().arena(state.machine_rank(state.rank()))->allocate(bytes);
  std::memset(memory.data(), 0, bytes);
  memory.as<GroupHeader>()->users.store(static_cast<std::uint32_t>(size));
  return memory;
}

}  // namespace

Group GroupFactory::make(std::shared_ptr<Machine> machine, int rank, std::chrono::milliseconds timeout) {
  std::vector<int> ranks(static_cast<std::size_t>(machine->size()));
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int>(i);
  const GroupArea area = machine->group_area();
  return Group(std::make_unique<Group::Parts>(std::move(machine), area, std::move(ranks), rank, timeout));
}

Group::Group(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Group::Group(Group&&) noexcept = default;

Group& Group::operator=(Group&& other) noexcept {
  Group(std::move(other)).parts_.swap(parts_);
  return *this;
}

Group::~Group() {
  if (parts_ == nullptr) return;
  GroupState& state = parts_->state;
  const std::shared_ptr<Machine> machine = state.shared_machine();
  if (parts_->is_whole_machine() && !parts_->left) poison("it went away without leave(), after an error or by mistake");
  if (!parts_->worker.idle()) state.waiter().cancel();
  const GroupArea area = state.area();
  const bool counted = !parts_->is_whole_machine();
  Memory area_memory = std::move(parts_->area_memory);
  parts_.reset();
  if (counted) area.header().users.fetch_sub(1);
  if (area_memory.data() != nullptr) machine->retire(std::move(area_memory));
}

void Group::leave() {
  parts_->worker.drain();
  parts_->mailbox.drain();
  parts_->left = true;
  const GroupState& state = parts_->state;
  if (parts_->is_whole_machine()) state.machine().seat(state.machine_rank(state.rank())).state.store(Seat::kLeft);
}

int Group::rank() const { return parts_->state.rank(); }
int Group::size() const { return parts_->state.size(); }
int Group::job_rank(int rank) const { return parts_->state.job_rank(rank); }

void Group::set_timeout(std::chrono::milliseconds timeout) {
  parts_->worker.drain();
  parts_->timeout = timeout;
  parts_->state.waiter().set_timeout(timeout);
  parts_->mailbox.set_timeout(timeout);
}

Memory Group::allocate(std::size_t bytes) {
  const GroupState& state = parts_->state;
  return state.machine().arena(state.machine_rank(state.rank()))->allocate(bytes);
}

std::byte* Group::peer_memory(int rank, std::uint64_t offset, std::size_t bytes) {
  const GroupState& state = parts_->state;
  const auto owner = static_cast<std::uint16_t>(state.machine_rank(rank));
  return state.machine().pointer({.kind = Place::Kind::kArena, .owner = owner, .at = offset}, bytes);
}

void Group::run(const Call& call, std::optional<std::chrono::milliseconds> timeout) {
  std::visit([this](const auto& one) { check_call(one, size()); }, call);
  std::visit(
      [&](const auto& one) {
        using Type = std::decay_t<decltype(one)>;
        if constexpr (std::is_same_v<Type, Send>)
          parts_->mailbox.send(one);
        else if constexpr (std::is_same_v<Type, Receive>)
          parts_->mailbox.receive(one);
        else if (!parts_->worker.idle())
          start(call, timeout).wait();
        else
          parts_->state.run([&] { make_call(parts_->state, one); }, timeout);
      },
      call);
}

void Group::run_as(const Intent& announced, const Call& call) {
  std::visit([this](const auto& one) { check_call(one, size()); }, call);  // what throws must not leave it announced
  parts_->worker.drain();
  parts_->state.announce_as(announced);
  run(call);
}

void Group::send(const Send& call) {
  check_call(call, size());
  parts_->mailbox.send(call);
}

int Group::receive(const Receive& call) {
  check_call(call, size());
  return parts_->mailbox.receive(call);
}

Work Group::start(Call call, std::optional<std::chrono::milliseconds> timeout) {
  std::visit([this](const auto& one) { check_call(one, size()); }, call);
  GroupState& state = parts_->state;
  return std::visit(
      [&](auto& one) {
        using Type = std::decay_t<decltype(one)>;
        if constexpr (kIsMessage<Type>)
          return Work(parts_->mailbox.start(one));
        else
          return Work(parts_->worker.start(
              [&state, timeout, mine = std::move(one)] { state.run([&] { make_call(state, mine); }, timeout); }));
      },
      call);
}

std::optional<Group> Group::subgroup(const std::vector<int>& ranks) {
  check_subgroup(ranks, size());
  parts_->worker.drain();
  GroupState& state = parts_->state;
  const auto place = std::find(ranks.begin(), ranks.end(), rank());
  const int new_rank = place == ranks.end() ? -1 : static_cast<int>(place - ranks.begin());
  SubgroupOffers offers(size(), ranks);
  Memory area;
  state.run([&] {
    if (new_rank == 0) area = make_area(state, static_cast<int>(ranks.size()));
    offers.exchange(state, area.offset());
  });
  if (new_rank < 0) return std::nullopt;
  const int leader = ranks.front();
  std::byte* const base =
      peer_memory(leader, offers.offset_from(leader), GroupArea::bytes(static_cast<int>(ranks.size())));
  std::vector<int> machine_ranks;
  for (const int member : ranks) machine_ranks.push_back(state.machine_rank(member));
  auto parts = std::make_unique<Parts>(state.shared_machine(), GroupArea(base, static_cast<int>(ranks.size())),
                                       std::move(machine_ranks), new_rank, parts_->timeout);
  parts->borrowed_area = new_rank != 0;
  parts->area_memory = std::move(area);
  return Group(std::move(parts));
}

void Group::poison(const std::string& reason) {
  const GroupState& state = parts_->state;
  const int rank = state.machine_rank(state.rank());
  state.machine().poison_if_any_died();  // then this rank failed for that reason
  state.machine().poison(Cause::kFailed, rank, concat(state.machine().name(rank), " failed: ", reason),
                         state.machine().describe(rank));
}

std::string Group::describe_ranks() const { return parts_->state.everyone(); }

bool Work::done() const { return state_->finished(); }

void Work::wait(Deadline deadline) const {
  if (state_->wait(&deadline)) return;
  throw PeerLost({.what = "a call that was started is not finished at the deadline",
                  .likely = "a rank that is slower than the others, or stopped",
                  .next = "wait longer, or look at what each rank is doing"});
}

void Work::wait() const { state_->wait(nullptr); }

int Work::source() const { return state_->source; }

}  // namespace lockstep::shm
