// SPDX-License-Identifier: Apache-2.0
// collective/shm/exchange.h: the collectives that move data and compute nothing: barrier, broadcast, all_gather, gather,
// scatter and all_to_all. Each rank shows its input; each rank then copies what it wants of the others' inputs.
//
// A rank shows its K bytes in one of three ways, and its peers learn which from its announcement:
//
//   slot    at most 4 KiB: copied into its slot before it arrives; nobody waits again
//   direct  memory that its peers can reach: they copy from where it lies, and the rank waits until all have
//   staged  other memory: in chunks through its staging memory, one wait per chunk. Where all ranks want the same
//           bytes a chunk is one piece; where each wants its own, a chunk has a lane per rank
//
// Memory traffic: one read and one write per byte and reader; twice that when staged.
//
// Threads: the group's rules
// Ranks:   all
#pragma once

#include "lockstep/collective/call.h"
#include "lockstep/collective/shm/group_state.h"

namespace lockstep::shm {

void barrier(GroupState& group);
void broadcast(GroupState& group, const Call& call);
void gather(GroupState& group, const Call& call);  // or all_gather; also the one that makes a sub-group
void scatter(GroupState& group, const Call& call);
void all_to_all(GroupState& group, const Call& call);

}  // namespace lockstep::shm
