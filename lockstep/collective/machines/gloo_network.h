// SPDX-License-Identifier: Apache-2.0
// collective/machines/gloo_network.h: where the Gloo of each rank listens, and how the ranks' connections pass between machines:
// through a tunnel of each machine (tunnel.h), or in an insecure network by themselves.
//
// Note [Shared listeners]
// A device of Gloo is a socket that listens and a thread that reads from all its connections. The thread wakes every 10 ms, also
// when there is nothing to read, and a server of many workers has connections with each of them: with a device for each, threads
// that do nothing took much of the cores. So a rank has at most as many devices as cores, which the connections of its World take
// in turn. Losing one connection does not disturb the others: Gloo closes those of one context. docs/design/hierarchy.md
//
// Flow:    gloo_connection.h -> here -> Gloo, tunnel.h
// Owns:    sockets that listen, and a thread for each; tunnels
// Threads: any
// Ranks:   all that are to be connected, at the same time
#pragma once

#include <gloo/transport/device.h>

#include <functional>
#include <memory>

#include "lockstep/collective/meet/store_ptr.h"
#include "lockstep/collective/transport/transport.h"

namespace lockstep {

using GlooDevice = std::shared_ptr<gloo::transport::Device>;

// Blocks until all ranks have said over `store` whether they encrypt, and with which keys. Throws RendezvousError: not all have
// come, or they don't want the same.
std::shared_ptr<GlooNetwork> join_gloo_network(c10d::Store& store, const TransportOptions& options);

// For some ranks of that network: blocks until all of them can connect, and calls connect(device). While that runs,
// their connections pass, and nobody else's. Throws RendezvousError: on all ranks, where a machine does not answer or
// has none of the keys; afterwards, where a stranger is connected.
void connect_through(GlooNetwork& network, c10d::Store& store, const TransportOptions& options,
                     const std::function<void(const GlooDevice&)>& connect);

}  // namespace lockstep
