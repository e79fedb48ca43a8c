// SPDX-License-Identifier: Apache-2.0
// dist_bounded: the library's own rule (strategy/kvstore/staleness_gate.h) says which worker may update and read.
#include "lockstep/plan/strategy_schedules.h"
#include "lockstep/strategy/kvstore/staleness_gate.h"

namespace lockstep::plan {
namespace {

enum class Wish { kUpdate, kRead, kLeave };
constexpr int kWishes = 3;

int ticket(int worker, Wish wish) { return kWishes * worker + static_cast<int>(wish); }

class BoundedStore : public Gate {
 public:
  BoundedStore(int workers, int staleness, bool several_servers) : gate_(workers, staleness, several_servers) {}

  void come(int ticket) override {
    if (wish_of(ticket) == Wish::kRead) gate_.ask_to_read(worker_of(ticket));
  }

  bool may_pass(int ticket) const override {
    const int worker = worker_of(ticket);
    switch (wish_of(ticket)) {
      case Wish::kUpdate: return gate_.may_update(worker);
      case Wish::kRead: return gate_.may_read(worker);
      case Wish::kLeave: return true;
    }
    return true;
  }

  void pass(int ticket) override {
    const int worker = worker_of(ticket);
    switch (wish_of(ticket)) {
      case Wish::kUpdate: return gate_.update(worker);
      case Wish::kRead: return gate_.read(worker);
      case Wish::kLeave: return gate_.leave(worker);
    }
  }

 private:
  static Wish wish_of(int ticket) { return static_cast<Wish>(ticket % kWishes); }
  static int worker_of(int ticket) { return ticket / kWishes; }

  StalenessGate gate_;
};

}  // namespace

int add_staleness_gate(Builder& b) {
  return b.add_gate([workers = b.devices(), staleness = b.choice().staleness, servers = b.choice().servers] {
    return std::make_unique<BoundedStore>(workers, staleness, servers > 1);
  });
}

// A worker pushes to the first server, which decides, then to the others; and it pulls in the same way.
void store_bounded(Builder& b, int gate, int step) {
  const int servers = b.choice().servers;
  const double size = b.parameter_bytes() / servers;
  for (const int device : b.all_devices()) {
    const int machine = b.machine_of(device);
    if (step == 0) b.pass(device, gate, ticket(device, Wish::kRead));
    b.forward_and_backward(device);
    Ids before, done;
    for (int s = 0; s < servers; ++s) {
      const int home = s % b.machines();
      if (s > 0) b.follow(device, before);
      b.touch(device, machine, "pack", 2 * size);
      b.send(device, machine, home, "push", size);
      if (s == 0) b.pass(device, gate, ticket(device, Wish::kUpdate));
      done.push_back(b.touch(device, home, "server updates", b.update_bytes(1) / servers));
      if (s == 0) before = b.last(device);
    }
    b.follow(device, done);
    before = {b.pass(device, gate, ticket(device, Wish::kRead))};
    done.clear();
    for (int s = 0; s < servers; ++s) {
      b.follow(device, before);
      done.push_back(b.send(device, s % b.machines(), machine, "pull", size));
      if (s == 0) before = b.last(device);
    }
    b.follow(device, done);
    b.touch(device, machine, "unpack", 2 * b.parameter_bytes());
  }
}

void leave_bounded_store(Builder& b, int gate) {
  for (const int device : b.all_devices()) b.pass(device, gate, ticket(device, Wish::kLeave));
}

}  // namespace lockstep::plan
