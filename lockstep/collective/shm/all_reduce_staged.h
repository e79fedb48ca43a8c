// SPDX-License-Identifier: Apache-2.0
// collective/shm/all_reduce_staged.h: reductions of memory that peers can't reach, chunk by chunk through staging
// memory. K bytes, p ranks:
//
//   two ranks    each stages all of its input and reduces the other's chunks with its own: K staged, K read
//   more         a chunk has a lane per rank. Each rank stages the parts of the others, reduces its own lane of the
//                chunk before from theirs and its own input, into its staged lane and its own output, and copies
//                the results of the chunk before that out of the others' lanes: K staged, 2K(p-1)/p read
//
// What others read next is stored past the caches (copy.h). One wait per chunk (GroupState::stream).
//
// Threads: the group's rules
// Ranks:   all, once they arrived and found that some memory is out of reach
#pragma once

#include "lockstep/collective/shm/group_state.h"
#include "lockstep/collective/shm/reduce_task.h"

namespace lockstep::shm {

void reduce_staged(GroupState& group, const ReduceTask& task);

}  // namespace lockstep::shm
