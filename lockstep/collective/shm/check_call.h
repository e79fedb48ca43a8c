// SPDX-License-Identifier: Apache-2.0
// collective/shm/check_call.h: refuses arguments that make no sense before anything is announced.
//
// Threads: any
// Ranks:   no communication; throws UsageError on the rank that made the mistake
#pragma once

#include <vector>

#include "lockstep/collective/call.h"

namespace lockstep::shm {

void check_call(const Call& call, int size);
void check_subgroup(const std::vector<int>& ranks, int size);

}  // namespace lockstep::shm
