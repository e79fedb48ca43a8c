// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/hierarchy.h"

#include "lockstep/base/text.h"
#include "lockstep/collective/machines/collectives.h"
#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

constexpr std::chrono::hours kAsLongAsTheGroup{24 * 365};  // the destructor ends that wait

void dispatch(Hierarchy& hierarchy, const Call& call) {
  switch (call.operation) {
    case Operation::kAllReduce: return all_reduce(hierarchy, call);
    case Operation::kReduce: return reduce(hierarchy, call);
    case Operation::kReduceScatter: return reduce_scatter(hierarchy, call);
    case Operation::kAllGather: return all_gather(hierarchy, call);
    case Operation::kBroadcast: return broadcast(hierarchy, call);
    case Operation::kGather:
    case Operation::kScatter:
    case Operation::kAllToAll: return exchange(hierarchy, call);
    default: return barrier(hierarchy);
  }
}

// Names of the peers of a link, for errors: all ranks, or the machines with their ranks.
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

Watchdog::Watchdog(shm::Group& inside, GlooLink::OnLoss on_loss) : group_(whole_group_of(inside)) {
  group_->set_timeout(kAsLongAsTheGroup);
  heard_ = group_->start({.operation = Operation::kReceive, .output = &goodbye_, .count = 1, .dtype = DType::kUInt8});
  thread_ = std::jthread([this, on_loss = std::move(on_loss)] {
    try {
      heard_->wait();
    } catch (...) {
      on_loss(std::current_exception());
    }
  });
}

Watchdog::~Watchdog() {
  const uint8_t goodbye = 0;
  try {
    group_->run(
        {.operation = Operation::kSend, .input = &goodbye, .count = 1, .dtype = DType::kUInt8, .peer = group_->rank()});
  } catch (const std::exception&) {  // a rank is lost: the thread ends by itself
  }
}

Hierarchy::Hierarchy(shm::GroupPtr group, const Topology& topology_of_ranks, StorePtr store,
                     TransportOptions options_of_rank)
    : CpuTransport(std::move(group), options_of_rank.describe),
      options(std::move(options_of_rank)),
      topology(topology_of_ranks),
      rank(options.rank),
      machine(topology.machine_of[rank]),
      machines(topology.machines()),
      smallest_machine(topology.smallest_machine()),
      ranks_here(topology.ranks_on(machine)),
      all(with_prefix(store, "flat"), options, names_of_ranks(topology)),
      messages(all, options.describe, options.message_headers),
      store_(std::move(store)) {
  options.network = all.network();
  between = connect_counterparts();
  if (inside->size() > 1) watchdog_.emplace(*inside, [this](const std::exception_ptr& error) { close(error); });
  if (between) between->watch([this](const std::exception_ptr& error) { give_up(cause_of(error)); });
}

// The ranks of this rank's local number on each machine; none for a number that some machine has not.
std::unique_ptr<GlooLink> Hierarchy::connect_counterparts() const {
  if (inside->rank() >= smallest_machine) return nullptr;
  TransportOptions mine = options;
  mine.rank = machine;
  mine.size = machines;
  return std::make_unique<GlooLink>(with_prefix(store_, concat("slice/", inside->rank())), mine,
                                    names_of_machines(topology));
}

Hierarchy::~Hierarchy() {
  if (std::uncaught_exceptions() > 0) {
    Hierarchy::fail("an exception");
  } else {
    queue_.drain();
    if (between) between->leave();
    watchdog_.reset();
  }
  queue_.close();  // its thread uses the links
}

// ---- Calls

int Hierarchy::run(const TensorCall& call) {
  check(call);
  if (is_message(call.operation)) {
    const observe::CallingOthers calling;
    const FuturePtr message = start_message(call, false);
    message->wait();
    return call.operation == Operation::kReceive ? message->source() : kAnyRank;
  }
  queue_.run([&] { make_call(call); });
  return kAnyRank;
}

FuturePtr Hierarchy::start(TensorCall call) {
  check(call);
  if (is_message(call.operation)) return start_message(call, true);
  FuturePtr future = queue_.add([this, call = std::move(call)] { make_call(call); });
  queue_.hand_to_worker();
  return future;
}

void Hierarchy::check(const Call& call) const {
  inside->require_own_process();
  check_call(call, options.size);
  if (call.algorithm != Algorithm::kCentral && call.algorithm != Algorithm::kTree) return;
  throw UsageError({.what = concat("all_reduce by the algorithm ", to_string(call.algorithm), " between machines"),
                    .here = options.describe,
                    .next = "leave the algorithm out, choose ring, or keep all ranks on one machine"});
}

FuturePtr Hierarchy::start_message(const TensorCall& call, bool in_background) {
  return call.operation == Operation::kSend ? messages.send(call) : messages.receive(call, in_background);
}

// Whatever a call throws ends the hierarchy, before the caller's arrays may go: until the links forget their transfers
// Gloo could still write there.
void Hierarchy::make_call(const Call& call) {
  const trace::Span span([&] {
    const Signature signature = signature_of(call);
    const auto bytes = to_int64(signature.count * size_of(signature.dtype));
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

void Hierarchy::set_timeout_of_collectives(milliseconds timeout) {
  inside->set_timeout(timeout);
  all.set_timeout(timeout);
  if (between) between->set_timeout(timeout);
}

void Hierarchy::set_timeout(milliseconds timeout) {
  queue_.run([&] {
    options.timeout = timeout;
    set_timeout_of_collectives(timeout);
    messages.set_timeout(timeout);
  });
}

// ---- Groups

std::unique_ptr<Transport> Hierarchy::group(const std::vector<int>& ranks, std::optional<milliseconds> separate) {
  queue_.drain();
  shm::GroupPtr members = group_inside(topology.local_ranks(machine, ranks), separate);
  const int made = groups_made_++;
  if (ranks.empty()) return nullptr;
  const Topology of_members = topology.of_group(ranks);
  if (of_members.machines() == 1) return std::make_unique<CpuTransport>(std::move(members));
  TransportOptions of_group = options_of_group(options, ranks);
  if (separate) {
    of_group.timeout = *separate;
    of_group.message_headers = false;
  }
  return std::make_unique<Hierarchy>(std::move(members), of_members, with_prefix(store_, prefix_of_group(made, ranks)),
                                     of_group);
}

// ---- Losses

void Hierarchy::fail(const std::string& reason) {
  inside->poison(reason);
  close(std::make_exception_ptr(PeerLost({.what = "this rank has failed: " + reason, .here = options.describe})));
}

// When a rank of this machine dies, another machine may notice first and close its links. The rank is then to blame, and
// not that machine.
std::exception_ptr Hierarchy::cause_of(const std::exception_ptr& error) const try {
  std::rethrow_exception(error);
} catch (const PeerLost&) {
  try {
    inside->throw_if_lost();
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
  } catch (const std::exception& known) {
    inside->poison(what_of(known));
  }
  close(error);
}

void Hierarchy::close(const std::exception_ptr& reason) {
  if (between) between->close(reason);
  all.close(reason);
  messages.close();
}

}  // namespace lockstep
