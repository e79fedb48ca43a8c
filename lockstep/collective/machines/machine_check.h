// collective/machines/machine_check.h: machines tell each other what they are about to do: Gloo ends the process when two sides
// of a message differ in size.
//
// Data need not wait for it: transfers of different wishes have different topics (host_link.h), and do not meet.
//
// The ranks of one machine compare by shared memory: intent_of().
//
// Flow:    a Collective -> Wish -> here -> MismatchError, or the transfers may be waited for
// Owns:    what the machines said
// Threads: one at a time
// Ranks:   one of each machine, those of the link, in the same order
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/collective/machines/machine_link.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/memory/control_block.h"
#include "lockstep/collective/transport.h"

namespace lockstep {

// One collective on tensors, between machines.
struct Collective {
  Operation operation = Operation::kBarrier;
  torch::Tensor input;
  torch::Tensor output;
  std::vector<std::int64_t> counts{};
  std::vector<std::int64_t> receive_counts{};
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  Algorithm algorithm = Algorithm::kDirect;
};

// What all ranks must want alike. Sent as it is.
struct Wish {
  std::int64_t operation = 0;
  std::int64_t dtype = 0;
  std::int64_t op = 0;
  std::int64_t algorithm = 0;
  std::int64_t root = 0;
  std::int64_t count = 0;  // elements
  std::int64_t parts = 0;  // a fingerprint of the parts' lengths; 0: even

  bool operator==(const Wish&) const = default;
};

Wish wish_of(const Collective& call, std::size_t count);

// The same for shared memory. The first collective inside a machine announces it, so that its ranks compare all of the
// wish: what they do there may be alike where the wishes are not (a mean is a sum until the machines divide it).
Signature intent_of(const Wish& wish);

// The collective that each piece, 0, 1, ... of a call begins with inside a machine: that of piece 0 announces the wish.
void run_inside(shm::Group& inside, const Wish& wish, std::size_t piece, const Call& call);

std::string to_string(const Wish& wish);  // "all_reduce of 10 float32 (sum, direct, root 0)"

class HostCheck {
 public:
  // Transfers that are started afterwards are about `mine`. Does not block.
  void begin(HostLink& between, const Wish& mine);

  // Block until that machine, or all, have said theirs. Throw MismatchError, PeerLost.
  void compare(HostLink& between, int node);
  void finish(HostLink& between);

  void give_up();  // after an error; what was said stays until the link has forgotten it, too

 private:
  std::vector<Wish> said_;  // by each machine
  std::vector<HostLink::Transfers> receives_;
  HostLink::Transfers sends_;
};

}  // namespace lockstep
