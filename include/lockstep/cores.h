// SPDX-License-Identifier: Apache-2.0
// lockstep/cores.h: the cores that this process may use, and how ranks share them.
//
// Flow:    the scheduler's affinity mask -> a share per rank -> its threads
// Owns:    nothing
// Threads: pin_this_thread changes the calling thread (and the threads it starts afterwards); the rest only reads
// Ranks:   no communication: every rank computes the same split
#pragma once

#include <string>
#include <vector>

namespace lockstep {

using CoreSet = std::vector<int>;  // core numbers, ascending

CoreSet usable_cores();  // what the scheduler lets this process use: taskset, cgroup cpusets and Slurm are honoured

// The cores of `rank` out of `ranks` on this machine: disjoint, as even as possible, and neighbours in a core, a NUMA
// node and a package, as far as the kernel tells. More ranks than cores share them round robin.
CoreSet cores_of_rank(const CoreSet& all, int rank, int ranks);

void pin_this_thread(const CoreSet& cores);  // throws SystemError

std::string to_string(const CoreSet& cores);  // {0, 1, 2, 5} -> "0-2,5"

}  // namespace lockstep
