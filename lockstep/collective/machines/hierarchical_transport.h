// collective/machines/hierarchical_transport.h: the transport for host tensors of ranks on several machines: shared memory
// inside each, c10d's Gloo between them.
//
//   all_reduce, reduce, broadcast, barrier   host_collectives.h: 2(n-1)/n * K leave each of n machines
//   reduce_scatter, all_gather               host_parts.h: (n-1)/n * K leave each machine
//   gather, scatter, all_to_all              host_exchange.h: straight from rank to rank
//   messages                                 Gloo between all ranks
//
// Owns:    the shared memory's group, the connections, a thread that carries collectives out in the order of their
//          start
// Threads: one at a time
// Ranks:   all of all machines; each machine may have another number of them
//
// When a rank is lost its machine's shared memory is poisoned, and every rank that finds out closes its connections to
// the other machines, where the same happens: all ranks of all machines get PeerLost. So they do when ranks disagree
// (those that see it get MismatchError).
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "lockstep/collective/machines/machine_collectives.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/transport.h"

namespace lockstep {

// `inside`: the ranks of this machine, in the order of their ranks. Blocks until this rank is connected to all others.
// Throws RendezvousError.
std::unique_ptr<Transport> make_hierarchical(shm::Group inside, const Machines& machines,
                                             const c10::intrusive_ptr<c10d::Store>& store,
                                             const TransportOptions& options);

}  // namespace lockstep
