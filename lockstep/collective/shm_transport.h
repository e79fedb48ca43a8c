// collective/shm_transport.h: the shared-memory core as a transport for host tensors.
//
// Flow:    collective/rendezvous.h -> here -> collective/world.h
// Owns:    this rank's side of the shared memory
// Ranks:   every rank of the machine makes its transport at the same time
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <vector>

#include "lockstep/collective/transport.h"

namespace lockstep {

// Ranks that are processes of one machine: they exchange one address through `world`'s store, then memory.
// Blocks until all are connected. Throws RendezvousError, SystemError.
std::unique_ptr<Transport> make_shared_memory(const World& world, const TransportOptions& options);

// Ranks that are threads of this process: the transport of each, in rank order.
std::vector<std::unique_ptr<Transport>> make_shared_memory_of_threads(int ranks, std::chrono::milliseconds timeout);

}  // namespace lockstep
