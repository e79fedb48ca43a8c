// SPDX-License-Identifier: Apache-2.0
// collective/meet/agent_store.h: the store of torchrun's agent, which serves it to the ranks that it starts: c10d's TCPStore,
// which lets in whoever connects.
//
// Flow:    rendezvous.cc -> here -> base/sockets/endpoint.h, c10d::TCPStore
// Owns:    the connection
// Threads: call from one thread
// Ranks:   all of them join
#pragma once

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/collective/meet/store_ptr.h"

namespace lockstep {

// torchrun says so: TORCHELASTIC_USE_AGENT_STORE.
bool agent_serves_store();

// Blocks until a store answers there. Throws RendezvousError.
StorePtr join_agent_store(const Endpoint& endpoint, milliseconds timeout);

}  // namespace lockstep
