// SPDX-License-Identifier: Apache-2.0
// dist_bounded: the library's own rule (strategy/kvstore/staleness_gate.h) says which worker may update and read.
#include "lockstep/plan/strategy_schedules.h"
#include "lockstep/strategy/kvstore/staleness_gate.h"

namespace lockstep::plan {
namespace {

enum class Request { kUpdate, kRead, kLeave };
constexpr int kRequests = 3;

int ticket(int worker, Request request) { return kRequests * worker + static_cast<int>(request); }

class BoundedStore : public Gate {
 public:
  BoundedStore(int workers, int staleness, bool several_servers) : gate_(workers, staleness, several_servers) {}

  void come(int ticket) override {
    if (request_of(ticket) == Request::kRead) gate_.ask_to_read(worker_of(ticket));
  }

  bool may_pass(int ticket) const override {
    const int worker = worker_of(ticket);
    switch (request_of(ticket)) {
      case Request::kUpdate: return gate_.may_update(worker);
      case Request::kRead: return gate_.may_read(worker);
      case Request::kLeave: return true;
    }
    return true;
  }

  void pass(int ticket) override {
    const int worker = worker_of(ticket);
    switch (request_of(ticket)) {
      case Request::kUpdate: return gate_.update(worker);
      case Request::kRead: return gate_.read(worker);
      case Request::kLeave: return gate_.leave(worker);
    }
  }

 private:
  static Request request_of(int ticket) { return static_cast<Request>(ticket % kRequests); }
  static int worker_of(int ticket) { return ticket / kRequests; }

  StalenessGate gate_;
};

}  // namespace

int add_staleness_gate(Builder& b) {
  return b.add_gate([workers = b.devices(), staleness = b.choice().staleness, servers = b.choice().servers] {
    return std::make_unique<BoundedStore>(workers, staleness, servers > 1);
  });
}

// A worker pushes to the first server, which decides when it may update, then to the others; and it pulls in the same way.
void store_bounded(Builder& b, const Ids& locks, int gate, int step) {
  AsyncStore store(b, locks);
  for (const int device : b.all_devices()) {
    const auto pass = [&](Request request, int arrived) {
      return b.pass_gate(device, gate, ticket(device, request), {arrived});
    };
    if (step == 0) b.pass_gate(device, gate, ticket(device, Request::kRead));
    b.forward_and_backward(device);
    const int first = store.update(device, 0, {pass(Request::kUpdate, store.push(device, 0))});
    Ids updated{first}, pulled;
    for (int s = 1; s < store.servers(); ++s)
      updated.push_back(store.update(device, s, {store.push(device, s, {first})}));
    pulled = {store.pull(device, 0, {pass(Request::kRead, store.ask(device, 0, updated))}, {})};
    const Ids first_pulled = pulled;
    for (int s = 1; s < store.servers(); ++s)
      pulled = {store.pull(device, s, {store.ask(device, s, first_pulled)}, pulled)};
    store.unpack(device, pulled);
  }
}

void leave_bounded_store(Builder& b, int gate) {
  for (const int device : b.all_devices()) b.pass_gate(device, gate, ticket(device, Request::kLeave));
}

}  // namespace lockstep::plan
