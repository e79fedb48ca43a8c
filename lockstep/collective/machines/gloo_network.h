// SPDX-License-Identifier: Apache-2.0
// collective/machines/gloo_network.h: where the Gloo of each rank listens, and how the ranks' connections pass between machines:
// through a tunnel of each machine (tunnel.h), or in an insecure network by themselves.
//
// Note [Shared listeners]
// A device of Gloo is a socket that listens and a thread that reads from all its connections. A rank has at most as many as cores,
// which the connections of its World take in turn (docs/design/hierarchy.md#shared-listeners). Losing one connection does not
// disturb the others: Gloo closes those of one context.
//
// Flow:    link.h, gloo_messages.h -> here -> Gloo, tunnel.h
// Owns:    sockets that listen, and a thread for each; tunnels
// Threads: any
// Ranks:   all that are to be connected, at the same time
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/collective/transport/transport.h"

namespace lockstep {

// A connection of some ranks over c10d's Gloo, for the files that may see Gloo's headers.
class GlooConnection : public c10d::ProcessGroupGloo {
 public:
  GlooConnection(const StorePtr& store, const TransportOptions& options, c10::intrusive_ptr<Options> gloo_options,
                 std::shared_ptr<GlooNetwork> network_of_ranks)
      : ProcessGroupGloo(store, options.rank, options.size, std::move(gloo_options)),
        network(std::move(network_of_ranks)) {}

  const std::shared_ptr<GlooNetwork> network;

  // Closes all connections, which ends every wait here and at the peers. Blocks for about a millisecond.
  void close();
};

using Gloo = c10::intrusive_ptr<GlooConnection>;

// Blocks until all ranks are connected to each other. Throws RendezvousError. From the first connection on this process
// ignores SIGPIPE, unless it has a handler.
Gloo connect_gloo(const StorePtr& store, const TransportOptions& options);

}  // namespace lockstep
