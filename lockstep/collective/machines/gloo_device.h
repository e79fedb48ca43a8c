// SPDX-License-Identifier: Apache-2.0
// collective/machines/gloo_device.h: what all connections of a rank over Gloo have in common: TLS or not, the key, and the
// sockets and threads that they share.
//
// Note [Shared listeners]
// A device of Gloo is a socket that listens and a thread that reads from all its connections. The thread wakes every 10 ms, also
// when there is nothing to read, and a server of many workers has connections with each of them: with a device for each, threads
// that do nothing took much of the cores. So a rank has at most as many devices as cores, which the connections of its World take
// in turn. Losing one connection does not disturb the others: Gloo closes those of one context. docs/design/hierarchy.md
//
// Note [Gloo's TLS]
// libtorch 2.11 has Gloo's transport TCP_TLS, but connects ranks in the clear over it: tcp::Context's
// createAndConnectAllPairs() makes pairs by an overload of createPair() that tls::Context does not override. So the device
// here connects the ranks itself, by the createPair() that makes pairs of TLS, as Gloo did before, and then makes that
// function of its context do nothing: in a copy of the class's table of virtual functions, in which the function must be
// where 2.11 has it, or RendezvousError is thrown. gloo_openssl.cc says what else is changed about Gloo's TLS.
//
// Who may connect: while the ranks meet, only addresses of their machines; when they have met, nobody
// (listener_filter.h). Both ends of a connection check the other's certificate (gloo_identity.h).
//
// Flow:    gloo_connection.h -> here -> Gloo
// Owns:    sockets that listen, and a thread for each
// Threads: any
// Ranks:   all that are to be connected, at the same time
#pragma once

#include <gloo/transport/device.h>

#include <memory>

#include "lockstep/collective/meet/store_ptr.h"
#include "lockstep/collective/transport/transport.h"

namespace lockstep {

using GlooDevice = std::shared_ptr<gloo::transport::Device>;

// Blocks until all ranks have said over `store` whether they encrypt, and with which certificates. Throws RendezvousError: not all
// have come, or they don't want the same.
std::shared_ptr<GlooNetwork> join_gloo_network(c10d::Store& store, const TransportOptions& options);

// For a connection of some ranks of that network. Where it is TLS, the context that Gloo makes of it connects them over `store`, and
// blocks meanwhile. Throws RendezvousError: a rank does not answer, or does not have the certificate that it has told; another
// Gloo than that of libtorch 2.11.
GlooDevice device_on(const std::shared_ptr<GlooNetwork>& network, const StorePtr& store,
                     const TransportOptions& options);

// All have connected.
void let_nobody_else_in(gloo::transport::Device& device);

}  // namespace lockstep
