// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/collectives.h"

namespace lockstep {

PartCounts counts_of(const Call& call, int ranks) {
  return call.counts.empty() ? PartCounts(ranks, call.count) : PartCounts(call.counts);
}

// The ranks of a machine compare through shared memory, the first ranks of the machines over their link. The last
// barrier keeps a rank from sending while its machine has not heard from the others.
void check_all_ranks(Hierarchy& hierarchy, const Call& call) {
  const Signature mine = signature_of(call);
  hierarchy.inside->run({.operation = Operation::kBarrier}, &mine);
  if (hierarchy.inside->rank() == 0) {
    hierarchy.between->begin_check(mine);
    hierarchy.between->finish_check();
  }
  hierarchy.inside->barrier();
}

// One round: all messages are under way at the same time, and every rank has posted its receive from each other rank
// whatever order the others send in.
void exchange(Hierarchy& hierarchy, const Call& call, const PartCounts& send, const PartCounts& receive) {
  GlooLink& all = hierarchy.all;
  GlooLink::Transfers transfers;
  const auto* from = static_cast<const std::byte*>(call.input);
  auto* to = static_cast<std::byte*>(call.output);
  for (int rank = 0; rank < all.size(); ++rank) {
    const std::size_t sent = send[rank] * size_of(call.dtype);
    const std::size_t received = receive[rank] * size_of(call.dtype);
    if (rank == all.rank() && received > 0) std::memcpy(to, from, received);
    if (rank != all.rank()) {
      all.receive(rank, to, received, transfers);
      all.send(rank, from, sent, transfers);
    }
    from += sent;
    to += received;
  }
  all.wait(transfers);
}

}  // namespace lockstep
