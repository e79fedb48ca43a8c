// SPDX-License-Identifier: Apache-2.0
// bench/hosts/systems.h: what `lockstep bench hosts` compares, each with ranks on every host of a network.
//
// Flow:    words of cases (bench/collectives/cases.h) -> a process per rank, inside its host -> seconds
// Threads: start them from the main thread while it is the only one (they fork)
#pragma once

#include "bench/collectives/systems.h"
#include "bench/hosts/network.h"

namespace lockstep::bench {

// World's collectives: shared memory inside a host, the hierarchy between hosts. The network must outlive it.
RunningSystemPtr start_hierarchy(const Network& network, int ranks_per_host);

// c10d's Gloo between all ranks, as PyTorch uses it on CPUs.
RunningSystemPtr start_flat_gloo(const Network& network, int ranks_per_host);

}  // namespace lockstep::bench
