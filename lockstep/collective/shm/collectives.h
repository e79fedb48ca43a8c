// SPDX-License-Identifier: Apache-2.0
// collective/shm/collectives.h: the collectives of a group, each in the verbs of group_state.h.
//
// all_reduce.cc, all_reduce_staged.cc, all_reduce_reference.cc and exchange.cc say at their beginning how each works,
// and what each rank does for K bytes and p ranks.
//
// Threads: the group's rules
// Ranks:   all
#pragma once

#include "lockstep/collective/shm/group_state.h"

namespace lockstep::shm {

// These refuse arguments that make no sense, before anything is announced. They throw UsageError on the rank that made
// the mistake.
void check_call(const Call& call, int size);
void check_subgroup(const std::vector<int>& ranks, int size);

void all_reduce(GroupState& group, const Call& call);            // or reduce, or reduce_scatter; by kDirect
void all_reduce_reference(GroupState& group, const Call& call);  // by another call.algorithm
void barrier(GroupState& group);
void broadcast(GroupState& group, const Call& call);
void gather(GroupState& group, const Call& call);  // or all_gather; also the one that makes a sub-group
void scatter(GroupState& group, const Call& call);
void all_to_all(GroupState& group, const Call& call);

}  // namespace lockstep::shm
