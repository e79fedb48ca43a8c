// SPDX-License-Identifier: Apache-2.0
// collective/machines/gloo_device.h: the networks that Gloo connects ranks over: one whose connections are TLS, or a plain
// one.
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
// Owns:    a listening socket, and a thread that reads from all connections
// Threads: one at a time
// Ranks:   all that are to be connected, at the same time
#pragma once

#include <gloo/transport/device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "lockstep/collective/transport.h"

namespace lockstep {

using GlooDevice = std::shared_ptr<gloo::transport::Device>;

// Both block until all ranks have said over `store` which of the two they want. Throw RendezvousError: not all have come,
// or they don't want the same.
GlooDevice plain_gloo_device(const c10::intrusive_ptr<c10d::Store>& store, const TransportOptions& options);

// The context that Gloo makes of it connects the ranks over `store`, and blocks meanwhile. Throws RendezvousError: a rank
// does not answer, or does not have the certificate that it has told; another Gloo than that of libtorch 2.11.
GlooDevice tls_gloo_device(const c10::intrusive_ptr<c10d::Store>& store, const TransportOptions& options);

// All have connected.
void let_nobody_else_in(const gloo::transport::Device& device);

}  // namespace lockstep
