// SPDX-License-Identifier: Apache-2.0
// collective/connect.h: connects ranks that have a store in common: through shared memory where all are on one machine,
// otherwise by the hierarchy.
//
// Flow:    World::from_env, c10d/backend.cc -> here -> shared_memory_transport.h, machines/hierarchy.h
// Owns:    nothing; the hierarchy keeps the store, for its groups
// Threads: one at a time
// Ranks:   all ranks, at the same time, each with a store, or a prefix of one, that serves one connection
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/collective/transport.h"

namespace lockstep {

struct CpuConnection {
  std::unique_ptr<CpuTransport> transport;
  std::vector<int> machine_of;  // of each rank: its machine, numbered 0, 1, ... by first appearance
};

// Ranks with the same `machine` share memory. Blocks until all ranks are connected. Throws RendezvousError naming the
// ranks that did not come; SystemError.
CpuConnection connect_cpu_ranks(const c10::intrusive_ptr<c10d::Store>& store, const std::string& machine,
                                TransportOptions options);

// The address at which ranks on other machines reach this one, by the route to the store's host. All ranks call. Throws
// RendezvousError, SystemError.
std::string reachable_address(c10d::Store& store, const TransportOptions& options);

// The same on two ranks if they can share memory: one running kernel, and one machine to the launcher, which numbers it
// `node`. So containers, and hosts that are simulated on one machine, are machines where each has a launcher of its own.
std::string machine_id(const std::string& node);

}  // namespace lockstep
