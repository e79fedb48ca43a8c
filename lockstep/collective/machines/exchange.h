// SPDX-License-Identifier: Apache-2.0
// collective/machines/exchange.h: what gather.cc, scatter.cc and all_to_all.cc share. Every byte of them is for one
// rank alone, so it goes straight from its rank to that one: there is nothing to add up or to share inside a machine.
//
// Flow:    gather.cc, scatter.cc, all_to_all.cc -> here -> link.h between all ranks
// Threads: one at a time
// Ranks:   all of all machines, in the same order
#pragma once

#include "lockstep/collective/machines/hierarchy.h"

namespace lockstep {

using PartCounts = IntVector<std::size_t>;

// Elements of each rank's part.
PartCounts counts_of(const Call& call, int ranks);

// Blocks until it is known that all ranks make this call: no rank may send before. 24 bytes between each two machines.
// Throws MismatchError, PeerLost.
void check_all_ranks(Hierarchy& hierarchy, const Call& call);

// Sends send[r] elements to each rank r and receives receive[r] from it; what lies one after the other in call.input
// and in call.output. Blocks. Throws PeerLost.
void exchange(Hierarchy& hierarchy, const Call& call, const PartCounts& send, const PartCounts& receive);

}  // namespace lockstep
