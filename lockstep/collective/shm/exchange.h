// collective/shm/exchange.h: the collectives that move data and compute nothing: barrier, broadcast, all_gather,
// gather, scatter and all_to_all. Each rank shows something; each rank then copies what it wants of it.
//
// A rank shows its K bytes in one of three ways, and its peers learn which from its announcement:
//
//   slot    at most 4 KiB: copied into its slot before it arrives; nobody waits again
//   direct  memory that its peers can reach: they copy from where it lies, and the rank waits until all have
//   staged   other memory: in chunks through its staging memory, one wait per chunk. Where all want the same (a lane
//            for everyone) a chunk is one piece; where each wants something else, it has a lane per rank
//
// Sends nothing; the memory traffic is one read and one write per byte and reader, twice that when staged.
//
// Threads: the group's rules
// Ranks:   all
#pragma once

#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/group_state.h"

namespace lockstep::shm {

void barrier(GroupState& group);
void broadcast(GroupState& group, const Broadcast& call);
void all_gather(GroupState& group, const AllGather& call);
void gather(GroupState& group, const Gather& call);
void scatter(GroupState& group, const Scatter& call);
void all_to_all(GroupState& group, const AllToAll& call);

// all_gather under another name, for what belongs to making a sub-group.
void gather_for_subgroup(GroupState& group, const void* input, void* output, std::size_t bytes);

}  // namespace lockstep::shm
