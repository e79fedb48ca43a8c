// collective/shm/check_call.h: refuses arguments that make no sense before anything is announced.
//
// Threads: any
// Ranks:   no communication; throws UsageError on the rank that made the mistake
#pragma once

#include <vector>

#include "lockstep/collective/shm/group.h"

namespace lockstep::shm {

void check_call(const Barrier& call, int size);
void check_call(const AllReduce& call, int size);
void check_call(const Reduce& call, int size);
void check_call(const ReduceScatter& call, int size);
void check_call(const AllGather& call, int size);
void check_call(const Broadcast& call, int size);
void check_call(const Gather& call, int size);
void check_call(const Scatter& call, int size);
void check_call(const AllToAll& call, int size);
void check_call(const Send& call, int size);
void check_call(const Receive& call, int size);
void check_subgroup(const std::vector<int>& ranks, int size);

}  // namespace lockstep::shm
