// collective/machines/gloo_connection.h: a connection of some ranks over c10d's Gloo, for the files that may see Gloo's headers.
//
// Owns:    sockets and threads
// Threads: close() from any
// Ranks:   all that are to be connected, at the same time
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/collective/transport.h"

namespace lockstep {

class GlooConnection : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  // Ends every wait here and, as the connections are closed, at the peers. c10d has no call for that: a receive that
  // runs into its timeout does it.
  void close();
};

using Gloo = c10::intrusive_ptr<GlooConnection>;

// Blocks until all ranks are connected to each other. Throws RendezvousError.
Gloo connect_gloo(const c10::intrusive_ptr<c10d::Store>& store, const TransportOptions& options);

}  // namespace lockstep
