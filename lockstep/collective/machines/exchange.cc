// SPDX-License-Identifier: Apache-2.0
// gather, scatter and all_to_all between machines. Every byte of them is for one rank alone, so it goes straight from its
// rank to that one, in one round; there is nothing to add up or to share inside a machine.
//
//   gather      a rank other than root sends its part, root nothing
//   scatter     root sends all parts but its own, other ranks nothing
//   all_to_all  each rank sends every other rank its part: (p-1)/p of its data, where parts are even. Where they are not,
//               one more round before: an all_gather of what each rank sends to each, so that every rank knows what comes
//               and no two sides of a message differ in size
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/collectives.h"

namespace lockstep {
namespace {

using PartCounts = IntVector<size_t>;  // elements of each rank's part

// Blocks until this machine's ranks make this call, and the machine before. The ranks of a machine compare through shared
// memory, the first ranks of the machines over their link. Throws MismatchError, PeerLost.
void check_neighbours(Hierarchy& hierarchy, const Call& call) {
  const Signature mine = signature_of(call);
  hierarchy.inside->run({.operation = Operation::kBarrier}, &mine);
  if (hierarchy.inside->rank() == 0) {
    hierarchy.between->begin_check(mine);
    hierarchy.between->finish_check();
  }
  hierarchy.inside->barrier();
  hierarchy.all.begin(mine);
}

// table[r * p + s]: the elements that rank r sends to rank s.
void check_counts(Hierarchy& hierarchy, const Call& call) {
  const size_t ranks = call.counts.size();
  hierarchy.scratch = std::make_unique_for_overwrite<std::byte[]>(ranks * ranks * sizeof(size_t));
  const auto* const table = reinterpret_cast<const size_t*>(hierarchy.scratch.get());
  all_gather(hierarchy, {.operation = Operation::kAllGather,
                         .input = call.counts.data(),
                         .output = hierarchy.scratch.get(),
                         .count = ranks,
                         .dtype = DType::kInt64});
  const size_t* sent_here = table + hierarchy.rank;
  for (size_t from = 0; from < ranks; ++from, sent_here += ranks)
    if (*sent_here != call.receive_counts[from])
      refuse_counts(concat("rank ", from), *sent_here, concat("rank ", hierarchy.rank), call.receive_counts[from]);
}

// Sends send[r] elements to each rank r and receives receive[r] from it; they lie one after the other in call.input and
// in call.output. All messages are under way at the same time, and every rank has posted its receive from each other rank
// whatever order the others send in. Blocks. Throws PeerLost.
void transfer(GlooLink& all, const Call& call, const PartCounts& send, const PartCounts& receive) {
  GlooLink::Transfers transfers;
  const auto* from = static_cast<const std::byte*>(call.input);
  auto* to = static_cast<std::byte*>(call.output);
  for (int rank = 0; rank < all.size(); ++rank) {
    const size_t sent = send[rank] * size_of(call.dtype);
    const size_t received = receive[rank] * size_of(call.dtype);
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

}  // namespace

void exchange(Hierarchy& hierarchy, const Call& call) {
  check_neighbours(hierarchy, call);
  const int ranks = hierarchy.all.size();
  const PartCounts parts = call.counts.empty() ? PartCounts(ranks, call.count) : PartCounts(call.counts);
  if (call.operation == Operation::kAllToAll) {
    if (!call.counts.empty()) check_counts(hierarchy, call);
    return transfer(hierarchy.all, call, parts, call.counts.empty() ? parts : PartCounts(call.receive_counts));
  }
  PartCounts with_root(ranks);  // what goes between this rank and root alone
  with_root[call.root] = parts[hierarchy.rank];
  const PartCounts with_all = hierarchy.rank == call.root ? parts : PartCounts(ranks);
  const bool gathers = call.operation == Operation::kGather;
  transfer(hierarchy.all, call, gathers ? with_root : with_all, gathers ? with_all : with_root);
}

}  // namespace lockstep
