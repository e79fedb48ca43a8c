// SPDX-License-Identifier: Apache-2.0
// collective/c10d/backend_connect.h: connects the ranks of a shared-memory backend, through c10d's store.
//
// Flow:    c10d::Store -> here -> collective/shm/connect/rendezvous_server.h
// Threads: call from one thread
// Ranks:   all, once per store or prefix of one
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "lockstep/collective/shm/group.h"

namespace lockstep::backend {

// Blocks until all ranks are connected. Throws RendezvousError: ranks on different machines, ranks that did not come.
shm::Group connect(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);

}  // namespace lockstep::backend
