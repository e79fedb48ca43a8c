// SPDX-License-Identifier: Apache-2.0
// collective/transport/connect.h: connects ranks that have a store in common: through shared memory where all are on one machine,
// otherwise by the hierarchy.
//
// Flow:    World::from_env, c10d/backend.cc -> here -> cpu_transport.h, machines/hierarchy.h
// Owns:    nothing; the hierarchy keeps the store, for its groups
// Threads: one at a time
// Ranks:   all ranks, at the same time, each with the same store, or prefix of one; for several connections over it in
//          the same order
#pragma once

#include "agent/clusters/environment.h"
#include "lockstep/collective/transport/cpu_transport.h"

namespace lockstep {

struct CpuConnection {
  std::unique_ptr<CpuTransport> transport;
  std::vector<int> machine_of;  // of each rank: its machine, numbered 0, 1, ... by first appearance
};

// Ranks with the same `machine` share memory. Blocks until all ranks are connected. Throws RendezvousError naming the
// ranks that did not come, or at once the one that has failed; SystemError.
CpuConnection connect_cpu_ranks(const StorePtr& store, const std::string& machine, TransportOptions options);

// The address at which ranks on other machines reach this one, by the route to the store's host. All ranks call. Throws
// RendezvousError, SystemError.
std::string reachable_address(c10d::Store& store, const TransportOptions& options);

// The launcher's variables; of one rank where there are none, or they contradict each other: ranks that the program
// itself has numbered need none, or have some of them.
JobEnvironment job_environment_or_none();

// The same on two ranks if they can share memory: one running kernel, and one machine to the launcher, which numbers it
// (docs/design/c10d-backend.md). Without a launcher GROUP_RANK counts.
std::string this_machine();

}  // namespace lockstep
