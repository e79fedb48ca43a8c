// SPDX-License-Identifier: Apache-2.0
// collective/machines/collectives.h: the collectives of ranks on several machines, one file each: shared memory inside
// a machine, a link between machines.
//
//   notation: n machines, p ranks, K bytes per rank (of all parts together, where ranks have parts)
//
//                   leaves a machine, in bytes                rounds between machines
//   all_reduce      2(n-1)/n * K                              2, or 1; ring: 2(n-1)
//   reduce          K; (n-1)/n * K, or 0, from root's          2, or 1
//   barrier         1 byte to each                            1
//   reduce_scatter  (n-1)/n * K                               1
//   all_gather      (n-1)/n * K                               1, or n-1
//   broadcast       K, but for the last machine               n-1, overlapping; log2 n for a small array
//   gather, scatter, all_to_all   what other machines get     1
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
