// SPDX-License-Identifier: Apache-2.0
// collective/shm/all_reduce.h: all_reduce, reduce and reduce_scatter: the default algorithm, kDirect.
//
// The array is cut into a part per rank. Rank r reduces part r of all ranks' inputs, in the order 0 ... p-1, and stores
// the result where it is wanted. K bytes, p ranks; what each rank does:
//
//   one shot   small arrays: copies K into its slot; arrives; reads all slots and reduces all that it wants by itself
//   direct     arrives; reads its part (K/p) of every input in place, writes the result into every output in place;
//              waits a second time, until all ranks are done
//   staged     memory that peers can't reach: chunk by chunk through memory that they can (all_reduce_staged.h)
//
// After begin() all ranks see the same announcements, so all choose the same way.
//
// Threads: the group's rules
// Ranks:   all
#pragma once

#include "lockstep/collective/call.h"
#include "lockstep/collective/shm/group_state.h"

namespace lockstep::shm {

void all_reduce(GroupState& group, const Call& call);  // all_reduce, reduce or reduce_scatter

}  // namespace lockstep::shm
