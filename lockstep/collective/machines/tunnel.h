// SPDX-License-Identifier: Apache-2.0
// collective/machines/tunnel.h: carries Gloo's connections between machines over TLS. Gloo itself listens and connects on the
// loopback interface only.
//
// Note [Tunnel]
// Each machine of a job has a loopback address of its own (127.64.0.0/10), the same one on all machines, and Gloo listens there. On
// another machine this address is one of that machine itself: its tunnel listens at the same address and port, takes the
// connection that Gloo makes, and carries it over a TLS connection of its own to the tunnel of the machine where Gloo listens.
//
//   rank 0's Gloo -> 127.64.0.2:4711, tunnel of machine 1 == TLS == tunnel of machine 2 -> 127.64.0.2:4711, rank 1's Gloo
//
// docs/security.md#between-machines-tensors says who gets in. At Gloo's own listener only the tunnel: it connects from `sources()`,
// ports that nobody else can bind, and the kernel drops the packets of all others (listener_filter.h).
//
// Flow:    gloo_network.h -> here -> OpenSSL, sockets
// Owns:    a thread, which goes on after ~Tunnel until the ends of all connections have closed them: another rank of this machine
//          may still use one. A process that exits waits for that, at most kLastConnectionsWithin
// Threads: one at a time
// Ranks:   the first of each machine
#pragma once

#include <map>

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/collective/machines/tls_identity.h"

namespace lockstep {

inline constexpr std::chrono::seconds kLastConnectionsWithin{5};

class Tunnel {
 public:
  // Other machines' tunnels connect to `address`, a number. Gloo listens here at `own`, a loopback address, for `others` ranks of
  // other machines. Throws SystemError.
  Tunnel(std::shared_ptr<const TlsIdentity> identity, const std::string& address, const std::string& own, int others);
  ~Tunnel();  // lets nobody else in
  Tunnel& operator=(Tunnel&&) = delete;

  Endpoint endpoint() const;         // for the other machines' tunnels
  std::vector<int> sources() const;  // ports of `own` from which it connects to Gloo

  // Before start(): Gloo listens there, on another machine. False: the port is taken here.
  bool listen_for(const Endpoint& gloo);

  // `gloo_here`: where Gloo listens on this machine. `endpoint_of`: the tunnel for each address of the others.
  void start(std::vector<Endpoint> gloo_here, std::map<std::string, Endpoint> tunnels);

  // Asks the tunnel there whether it has one of the job's keys. Returns "" if it has, else why not. Blocks until the deadline at most.
  std::string try_to_reach(const Endpoint& tunnel, const Deadline& deadline) const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // the thread's, too
};

}  // namespace lockstep
