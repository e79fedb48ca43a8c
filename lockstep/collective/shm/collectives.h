// SPDX-License-Identifier: Apache-2.0
// collective/shm/collectives.h: the collectives of a group, each in the verbs of group.h.
//
// all_reduce.cc, all_reduce_reference.cc and exchange.cc say at their beginning how each works,
// and what each rank does for K bytes and p ranks.
//
// Threads: the group's rules
// Ranks:   all
#pragma once

#include "lockstep/collective/shm/group.h"

namespace lockstep::shm {

void all_reduce(Group& group, const Call& call);            // or reduce, or reduce_scatter
void all_reduce_reference(Group& group, const Call& call);  // by another call.algorithm than kDirect
void broadcast(Group& group, const Call& call);
void gather(Group& group, const Call& call);  // or all_gather; also the one that makes a sub-group
void scatter(Group& group, const Call& call);
void all_to_all(Group& group, const Call& call);

}  // namespace lockstep::shm
