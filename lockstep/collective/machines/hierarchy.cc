// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/hierarchy.h"

#include "lockstep/base/text.h"
#include "lockstep/collective/machines/collectives.h"
#include "lockstep/collective/shared_memory_transport.h"
#include "lockstep/observe/rank_progress.h"
#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

constexpr std::chrono::hours kAsLongAsTheGroup{24 * 365};  // the destructor ends that wait

void check_algorithm(const Call& call, const std::string& here) {
  if (call.algorithm == Algorithm::kDirect || call.algorithm == Algorithm::kRing) return;
  throw UsageError({.what = concat("all_reduce by the algorithm ", to_string(call.algorithm), " between machines"),
                    .here = here,
                    .next = "leave the algorithm out, choose ring, or keep all ranks on one machine"});
}

void dispatch(Hierarchy& hierarchy, const Call& call) {
  switch (call.operation) {
    case Operation::kAllReduce: return all_reduce(hierarchy, call);
    case Operation::kReduce: return reduce(hierarchy, call);
    case Operation::kReduceScatter: return reduce_scatter(hierarchy, call);
    case Operation::kAllGather: return all_gather(hierarchy, call);
    case Operation::kBroadcast: return broadcast(hierarchy, call);
    case Operation::kGather: return gather(hierarchy, call);
    case Operation::kScatter: return scatter(hierarchy, call);
    case Operation::kAllToAll: return all_to_all(hierarchy, call);
    default: return barrier(hierarchy);
  }
}

// What an error calls the peers of a link: all ranks, or the machines with their ranks.
std::vector<std::string> names_of_ranks(const Topology& topology) {
  std::vector<std::string> names;
  for (int rank = 0; rank < topology.ranks(); ++rank) names.push_back(concat("rank ", rank, " of ", topology.ranks()));
  return names;
}

std::vector<std::string> names_of_machines(const Topology& topology) {
  std::vector<std::string> names;
  for (int machine = 0; machine < topology.machines(); ++machine) {
    const std::vector<int> ranks = topology.ranks_on(machine);
    names.push_back(concat("machine ", machine, " (", ranks.size() == 1 ? "rank " : "ranks ", join(ranks, ", "), ")"));
  }
  return names;
}

}  // namespace

Watchdog::Watchdog(shm::Group& inside, MachineLink::OnLoss on_loss) : group_(whole_group_of(inside)) {
  group_.set_timeout(kAsLongAsTheGroup);
  heard_ = group_.start({.operation = Operation::kReceive, .output = &goodbye_, .count = 1, .dtype = DType::kUInt8});
  thread_ = std::jthread([this, on_loss = std::move(on_loss)] {
    try {
      heard_->wait();
    } catch (...) {
      on_loss(std::current_exception());
    }
  });
}

Watchdog::~Watchdog() {
  const std::uint8_t goodbye = 0;
  try {
    group_.send({.input = &goodbye, .count = 1, .dtype = DType::kUInt8, .peer = group_.rank()});
  } catch (const std::exception&) {  // a rank is lost: the thread ends by itself
  }
}

Hierarchy::Hierarchy(shm::Group group, const Topology& topology_of_ranks, c10::intrusive_ptr<c10d::Store> store,
                     TransportOptions options_of_rank)
    : options(std::move(options_of_rank)),
      topology(topology_of_ranks),
      rank(options.rank),
      machine(topology.machine_of[rank]),
      machines(topology.machines()),
      smallest_machine(topology.smallest_machine()),
      ranks_here(topology.ranks_on(machine)),
      inside(std::move(group)),
      all(with_prefix(store, "flat"), options, names_of_ranks(topology)),
      messages(all, options.describe, options.message_headers),
      store_(std::move(store)),
      queue_(options.describe) {
  options.network = all.network();
  between = connect_counterparts();
  if (inside.size() > 1) watchdog_.emplace(inside, [this](const std::exception_ptr& error) { close(error); });
  if (between) between->watch([this](const std::exception_ptr& error) { give_up(cause_of(error)); });
}

// The ranks of this rank's local number on each machine; none for a number that some machine has not.
std::unique_ptr<MachineLink> Hierarchy::connect_counterparts() const {
  if (inside.rank() >= smallest_machine) return nullptr;
  TransportOptions mine = options;
  mine.rank = machine;
  mine.size = machines;
  return std::make_unique<MachineLink>(with_prefix(store_, concat("slice/", inside.rank())), mine,
                                       names_of_machines(topology));
}

Hierarchy::~Hierarchy() {
  if (std::uncaught_exceptions() > 0) {
    Hierarchy::fail("an exception");
    return;
  }
  queue_.drain();
  if (between) between->leave();
  watchdog_.reset();
  try {
    inside.leave();
  } catch (const std::exception&) {  // a rank is lost: the others know
  }
}

// ---- Calls

int Hierarchy::run(const TensorCall& call) {
  if (is_message(call.call.operation)) {
    const observe::CallingOthers calling;
    const FuturePtr message = start_message(call, false);
    message->wait();
    return call.call.operation == Operation::kReceive ? message->source() : kAnyRank;
  }
  check_algorithm(call.call, options.describe);
  queue_.run([&] { make_call(call.call); });
  return kAnyRank;
}

FuturePtr Hierarchy::start(TensorCall call) {
  if (is_message(call.call.operation)) return start_message(call, true);
  check_algorithm(call.call, options.describe);
  FuturePtr future = queue_.add([this, call = std::move(call)] { make_call(call.call); });
  queue_.hand_to_worker();
  return future;
}

FuturePtr Hierarchy::start_message(const TensorCall& call, bool in_background) {
  return call.call.operation == Operation::kSend ? messages.send(call) : messages.receive(call, in_background);
}

// Whatever a call throws ends the hierarchy, before the caller's arrays may go: until the links forget their transfers
// Gloo could still write there.
void Hierarchy::make_call(const Call& call) {
  const trace::Span span([&] {
    const Signature signature = signature_of(call);
    const auto bytes = static_cast<std::int64_t>(signature.count * size_of(signature.dtype));
    return trace::Event{.name = "machines: " + to_string(call.operation), .bytes = bytes == 0 ? -1 : bytes};
  });
  observe::moved();
  const observe::CallingOthers calling;
  const bool own_timeout = call.timeout.count() > 0;
  if (own_timeout) set_timeout_of_collectives(call.timeout);
  const std::shared_ptr<void> usual_again(nullptr, [&](void*) {
    if (own_timeout) set_timeout_of_collectives(options.timeout);
  });
  try {
    dispatch(*this, call);
  } catch (const UsageError&) {
    throw;
  } catch (...) {
    const std::exception_ptr error = cause_of(std::current_exception());
    give_up(error);
    if (between) between->forget();
    all.forget();
    std::rethrow_exception(error);
  }
  scratch.reset();
}

void Hierarchy::set_timeout_of_collectives(std::chrono::milliseconds timeout) {
  inside.set_timeout(timeout);
  all.set_timeout(timeout);
  if (between) between->set_timeout(timeout);
}

void Hierarchy::set_timeout(std::chrono::milliseconds timeout) {
  queue_.run([&] {
    options.timeout = timeout;
    set_timeout_of_collectives(timeout);
    messages.set_timeout(timeout);
  });
}

torch::Tensor Hierarchy::allocate(torch::IntArrayRef sizes, const torch::TensorOptions& of_tensor) {
  return allocate_shared(inside, sizes, of_tensor);
}

// ---- Groups

std::unique_ptr<Transport> Hierarchy::group(const RankLists& lists) {
  queue_.drain();
  return transport_of(lists, subgroup_of(inside, topology.lists_on(machine, lists)), options);
}

std::unique_ptr<Transport> Hierarchy::separate(const RankLists& lists, std::chrono::milliseconds timeout) {
  queue_.drain();
  TransportOptions other = options;
  other.timeout = timeout;
  other.message_headers = false;
  return transport_of(lists, separate_group_of(inside, topology.lists_on(machine, lists), timeout), other);
}

std::optional<shm::Group> Hierarchy::machine_group() {
  queue_.drain();
  return whole_group_of(inside);
}

// `members`: those of this rank's list that are on this machine.
std::unique_ptr<Transport> Hierarchy::transport_of(const RankLists& lists, std::optional<shm::Group> members,
                                                   const TransportOptions& like) {
  const std::vector<int>& ranks = lists.begin()[rank];
  const int made = groups_made_++;
  if (ranks.empty()) return nullptr;
  const Topology of_members = topology.of_group(ranks);
  if (of_members.machines() == 1) return std::make_unique<SharedMemoryTransport>(std::move(*members));
  return std::make_unique<Hierarchy>(std::move(*members), of_members, with_prefix(store_, prefix_of_group(made, ranks)),
                                     options_of_group(like, ranks));
}

// ---- Losses

void Hierarchy::fail(const std::string& reason) {
  inside.poison(reason);
  close(std::make_exception_ptr(PeerLost({.what = "this rank has failed: " + reason, .here = options.describe})));
}

// When a rank of this machine dies, another machine may notice first and close its links. The rank is then to blame, and
// not that machine.
std::exception_ptr Hierarchy::cause_of(const std::exception_ptr& error) const try {
  std::rethrow_exception(error);
} catch (const PeerLost&) {
  try {
    inside.throw_if_lost();
  } catch (const PeerLost&) {
    return std::current_exception();
  }
  return error;
} catch (...) {
  return error;
}

// A call ended with `error`: ends all waits of this rank and tells the others. The hierarchy is of no more use then.
void Hierarchy::give_up(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    inside.poison(known.text().what);
  } catch (const std::exception& other) {
    inside.poison(other.what());
  }
  close(error);
}

void Hierarchy::close(const std::exception_ptr& reason) {
  if (between) between->close(reason);
  all.close(reason);
  messages.close();
}

}  // namespace lockstep
