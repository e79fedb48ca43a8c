// SPDX-License-Identifier: Apache-2.0
// collective/machines/collectives.h: the collectives of ranks on several machines, one file each: shared memory inside
// a machine, a link between machines.
//
// docs/design/hierarchy.md#steps-and-bytes has what each sends.
//
// All block until the call is done here. After an exception other than UsageError the hierarchy is of no more use: the
// caller closes it (Hierarchy::give_up).
//
// Flow:    hierarchy.cc -> here -> its links
// Threads: one at a time
// Ranks:   all of all machines, in the same order. Throw MismatchError: ranks make different calls; PeerLost
#pragma once

#include "lockstep/collective/machines/hierarchy.h"

namespace lockstep {

void all_reduce(Hierarchy& hierarchy, const Call& call);
void reduce(Hierarchy& hierarchy, const Call& call);
void barrier(Hierarchy& hierarchy);
void broadcast(Hierarchy& hierarchy, const Call& call);
void reduce_scatter(Hierarchy& hierarchy, const Call& call);
void all_gather(Hierarchy& hierarchy, const Call& call);
void exchange(Hierarchy& hierarchy, const Call& call);  // gather, scatter or all_to_all

}  // namespace lockstep
