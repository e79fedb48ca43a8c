// SPDX-License-Identifier: Apache-2.0
// collective/machines/gloo_connection.h: a connection of some ranks over c10d's Gloo, for the files that may see Gloo's
// headers.
//
// Owns:    sockets and threads
// Threads: close() from any
// Ranks:   all that are to be connected, at the same time
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/collective/transport/transport.h"

namespace lockstep {

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
