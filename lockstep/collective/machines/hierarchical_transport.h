// SPDX-License-Identifier: Apache-2.0
// collective/machines/hierarchical_transport.h: the transport for CPU tensors of ranks on several machines: shared
// memory inside each, c10d's Gloo between them.
//
// Flow:    World -> here -> collectives.h, gloo_messages.h -> Hierarchy's links
// Owns:    the shared memory's group, the connections, a thread that makes started collectives in the order of their
//          start
// Threads: one at a time; fail() from any
// Ranks:   all of all machines; machines may have different numbers of ranks
//
// When a rank is lost, or ranks make different calls, all ranks of all machines get PeerLost (hierarchy.h).
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/collective/machines/topology.h"
#include "lockstep/collective/transport.h"

namespace lockstep {

// `inside`: the ranks of this machine, in the order of their ranks. Blocks until this rank is connected to all others.
// Throws RendezvousError.
std::unique_ptr<Transport> make_hierarchical(shm::Group inside, const Topology& topology,
                                             const c10::intrusive_ptr<c10d::Store>& store,
                                             const TransportOptions& options);

}  // namespace lockstep
