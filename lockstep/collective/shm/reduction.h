// collective/shm/reduction.h: all_reduce, reduce and reduce_scatter. The array is cut into a part per rank; rank r
// reduces part r of all ranks' inputs, in the order 0 ... p-1, and stores the result where it is wanted.
//
// K bytes, p ranks; what each rank does:
//
//   one shot   copies K into its slot; arrives; reads all slots and reduces all it needs by itself
//   direct     arrives; reads its part (K/p) of every input where it lies, writes it into every output where it lies;
//              a second wait tells that everybody is done
//   staged     chunk by chunk through memory that all reach: staged_reduction.h
//
// Threads: the group's rules
// Ranks:   all
#pragma once

#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/group_state.h"

namespace lockstep::shm {

void all_reduce(GroupState& group, const AllReduce& call);  // algorithm kDirect
void reduce(GroupState& group, const Reduce& call);
void reduce_scatter(GroupState& group, const ReduceScatter& call);

}  // namespace lockstep::shm
