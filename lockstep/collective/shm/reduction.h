// collective/shm/reduction.h: all_reduce, reduce and reduce_scatter. The array is cut into a part per rank; rank r
// reduces part r of all ranks' inputs, in the order 0 ... p-1, and stores the result where it is wanted.
//
// K bytes, p ranks; what each rank does:
//
//   one shot   copies K into its slot; arrives; reads all slots and reduces all it needs by itself
//   direct     arrives; reads its part (K/p) of every input where it lies, writes it into every output where it lies;
//              a second wait tells that everybody is done
//   staged     in chunks c of p lanes: copies the parts of the others into its lanes; waits; copies the results of
//              chunk c-1 out of the others' lanes; reduces its lane of chunk c from the others' lanes and its own input
//              into its own lane and its own output
//
// In the staged way a chunk costs one wait: raising the flag for chunk c also says that the results of c-1 are there
// and that c-2 was copied out, so two halves of staging memory in turn are enough.
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
