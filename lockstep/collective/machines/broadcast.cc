// SPDX-License-Identifier: Apache-2.0
// broadcast between machines.
//
// Notation: n machines, K bytes. One rank per machine, its first, takes part between machines. For each chunk:
//
//   1   inside    root's machine: broadcast in shared memory
//   2   between   from machine to machine
//   3   inside    the other machines: broadcast in shared memory
//
// Several chunks go along a chain of machines, which starts at root's and follows the numbers: every machine but the
// last sends K, and all links are busy at once. It takes the time of K bytes over one link, and that of one chunk per
// machine more. One chunk goes down a binomial tree: log2 n steps. A tree for many chunks would send K log2 n from root.
//
// Invariant: a machine posts the receives of all chunks before it waits for the first, so no machine waits for the one
// after it.
#include "lockstep/collective/machines/collectives.h"
#include "lockstep/collective/machines/machine_collective.h"

namespace lockstep {
namespace {

// A 32nd of the array, 256 KiB to 1 MiB: each machine of the chain waits for a chunk before it passes it on.
size_t broadcast_chunk_bytes(size_t bytes) {
  return std::clamp(bytes / 32, size_t{256} << 10, size_t{1} << 20) / kCacheLine * kCacheLine;
}

// The machines that a machine receives from and sends to.
struct Route {
  int from = kNoMachine;
  std::vector<int> to{};
};

class MachineBroadcast : private MachineCollective {
 public:
  MachineBroadcast(Hierarchy& hierarchy, const Call& call)
      : MachineCollective(hierarchy, call, 1),
        root_machine_(hierarchy.topology.machine_of[call.root]),
        chunks_{call.count, broadcast_chunk_bytes(bytes(call.count)) / bytes(1)},
        route_(route()),
        arriving_(chunks_.size()) {}

  void run() {
    begin_check();
    if (owns_slice()) receive_all();
    const bool at_root = machine() == root_machine_;
    for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
      if (at_root) broadcast_inside(chunk, hierarchy_.topology.local_rank(call_.root));
      if (owns_slice()) pass_on(chunk);
      if (!at_root) broadcast_inside(chunk, 0);
    }
    finish_check();
    if (owns_slice()) link().wait(leaving_);
  }

 private:
  void receive_all() {
    if (route_.from == kNoMachine) return;
    for (size_t chunk = 0; chunk < chunks_.size(); ++chunk)
      link().receive(route_.from, at(chunk), bytes(chunks_[chunk].count), arriving_[chunk]);
  }

  // See Note [Signatures] in link.h. Root waits for no data, and checks when its own has been sent.
  void pass_on(size_t chunk) {
    if (chunk == 0 && route_.from != kNoMachine) link().check();
    link().wait(arriving_[chunk]);
    for (const int peer : route_.to) link().send(peer, at(chunk), bytes(chunks_[chunk].count), leaving_);
  }

  void broadcast_inside(size_t chunk, int root) {
    if (alone()) return;
    run_inside(chunk, {.operation = Operation::kBroadcast,
                       .output = at(chunk),
                       .count = chunks_[chunk].count,
                       .dtype = call_.dtype,
                       .root = root});
  }

  // Places count from root's machine, which has place 0. In the chain place p sends to p + 1. In the tree place p,
  // whose lowest set bit is d (for place 0 the next power of two), receives from p - d and sends to p + d/2, p + d/4,
  // ..., p + 1.
  Route route() const {
    const int place = (machine() - root_machine_ + machines()) % machines();
    const bool chain = chunks_.size() > 1;
    int distance = 1;
    while (!chain && distance < machines() && (place & distance) == 0) distance *= 2;
    Route route;
    if (place > 0) route.from = machine_at(place - distance);
    for (int step = chain ? 1 : distance / 2; step > 0; step /= 2)
      if (place + step < machines()) route.to.push_back(machine_at(place + step));
    return route;
  }

  int machine_at(int place) const { return (place + root_machine_) % machines(); }

  std::byte* at(size_t chunk) const { return static_cast<std::byte*>(call_.output) + bytes(chunks_[chunk].begin); }

  int root_machine_;
  Chunks chunks_;
  Route route_;
  std::vector<GlooLink::Transfers> arriving_;  // of each chunk
  GlooLink::Transfers leaving_;
};

}  // namespace

void broadcast(Hierarchy& hierarchy, const Call& call) { MachineBroadcast(hierarchy, call).run(); }

}  // namespace lockstep
