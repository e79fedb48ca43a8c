// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/hierarchy.h"

#include "lockstep/base/text.h"
#include "lockstep/collective/shared_memory_transport.h"

namespace lockstep {
namespace {

constexpr std::chrono::hours kAsLongAsTheGroup{24 * 365};  // the destructor ends that wait

// Of this rank's local number on each machine; none for a number that some machine has not.
std::unique_ptr<MachineLink> connect_counterparts(const Hierarchy& hierarchy,
                                                  const c10::intrusive_ptr<c10d::Store>& store,
                                                  const TransportOptions& options) {
  if (hierarchy.inside.rank() >= hierarchy.smallest_machine) return nullptr;
  TransportOptions mine = options;
  mine.rank = hierarchy.machine;
  mine.size = hierarchy.machines;
  return std::make_unique<MachineLink>(with_prefix(store, concat("slice/", hierarchy.inside.rank())), mine);
}

}  // namespace

Watchdog::Watchdog(shm::Group& inside, MachineLink::OnLoss on_loss) : group_(whole_group_of(inside)) {
  group_.set_timeout(kAsLongAsTheGroup);
  heard_ = group_.start({.operation = Operation::kReceive, .output = &goodbye_, .count = 1, .dtype = DType::kUInt8});
  thread_ = std::thread([this, on_loss = std::move(on_loss)] {
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
  thread_.join();
}

Hierarchy::Hierarchy(shm::Group group, const Topology& topology_of_ranks, const c10::intrusive_ptr<c10d::Store>& store,
                     const TransportOptions& options)
    : topology(topology_of_ranks),
      rank(options.rank),
      machine(topology.machine_of[rank]),
      machines(topology.machines()),
      smallest_machine(topology.smallest_machine()),
      ranks_here(topology.ranks_on(machine)),
      inside(std::move(group)),
      all(with_prefix(store, "flat"), options, "rank"),
      messages(all, options.describe, options.message_headers),
      between(connect_counterparts(*this, store, options)),
      describe_(options.describe) {
  if (inside.size() > 1) watchdog_.emplace(inside, [this](const std::exception_ptr& error) { close(error); });
  if (between) between->watch([this](const std::exception_ptr& error) { give_up(error); });
}

void Hierarchy::leave() {
  if (between) between->leave();
  watchdog_.reset();
  try {
    inside.leave();
  } catch (const std::exception&) {  // a rank is lost: the others know
  }
}

void Hierarchy::fail(const std::string& reason) {
  inside.poison(reason);
  close(std::make_exception_ptr(PeerLost({.what = "this rank has failed: " + reason, .here = describe_})));
}

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

void Hierarchy::forget_transfers() {
  if (between) between->forget();
  all.forget();
}

}  // namespace lockstep
