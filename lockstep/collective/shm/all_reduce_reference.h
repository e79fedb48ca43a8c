// SPDX-License-Identifier: Apache-2.0
// collective/shm/all_reduce_reference.h: all_reduce as other systems do it, for comparison: central, ring and tree. The
// default one is in all_reduce.h.
//
// All three work in place on one array of K bytes per rank that all ranks can reach: the output where it lies in an
// arena or ranks are threads, else a copy in the arena. A rank's flag says which steps it has finished.
//
//   central  rank 0 reads all p arrays and writes its own (p+1 times K past one core); then p-1 ranks copy K each
//   ring     2(p-1) steps of K/p: in step k rank r takes one part from its left neighbour, first adding, then copying
//   tree     2 log2(p) steps of K: partners at distance 1, 2, 4, ... are added pairwise up to rank 0, then copied down
//
// ring and tree round float16 and bfloat16 after every step.
//
// Threads: the group's rules
// Ranks:   all
#pragma once

#include "lockstep/collective/call.h"
#include "lockstep/collective/shm/group_state.h"

namespace lockstep::shm {

void all_reduce_reference(GroupState& group, const Call& call);  // by call.algorithm

}  // namespace lockstep::shm
