// SPDX-License-Identifier: Apache-2.0
// bench/network.h: hosts on one machine: network namespaces, each with one link to a switch.
//
//   host 0 -- eth0 ==== port0 --.
//   host 1 -- eth0 ==== port1 --+-- bridge         eth0 of host h has the address 10.77.0.(h + 1)
//   host 2 -- eth0 ==== port2 --'
//
// Both ends of a link let through `rate`, so that it is full duplex: as much goes in as out. The hosts share the
// machine's kernel, cores and memory, and no other network: there is none.
//
// Owns:    the namespaces; nothing outlives it or its process
// Threads: make it on the main thread while that is the only one (it forks)
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench/harness.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/int_vector.h"

namespace lockstep::bench {

// A network with interfaces, addresses and ports of its own. It is a descriptor, no name: the kernel removes the namespace
// and its interfaces with the last descriptor or process that holds it, so nothing is left behind however this program ends.
class NetworkNamespace {
 public:
  NetworkNamespace();  // its loopback device is down. Throws SystemError: not root

  // The calling thread, and what it starts, live here from now on.
  void enter() const;

  // Runs `body` on a thread that lives here, and throws what it throws.
  void run(const std::function<void()>& body) const;

  // Runs lines of sh here up to the first that fails. Throws SystemError.
  void shell(const std::string& script) const;

  std::string path() const;  // what `ip netns` and `nsenter --net` take, while this lives

 private:
  UniqueFd fd_;
};

// What a host's link has carried since it was made: frames with their headers, as the shaping counts them. An interface's own
// counters leave out headers: what the kernel cuts into frames later is one there.
struct LinkBytes {
  double sent = 0;
  double received = 0;
};

struct LinkOptions {
  double megabits_per_second = 1000;  // each direction
  std::string congestion_control{};   // of TCP: bbr, reno, ...; empty: this machine's
};

using Variables = std::vector<std::pair<std::string, std::string>>;

// Where one rank is, and where all of them meet.
struct RankPlace {
  int host = 0;
  int hosts = 1;
  int local_rank = 0;
  int ranks_per_host = 1;
  std::string address;
  int port = 0;
};

Variables launcher_variables(const RankPlace& place);  // those of torchrun, and one OpenMP thread

class Network {
 public:
  Network(int hosts, const LinkOptions& options);  // throws SystemError: not root, no iproute2

  int hosts() const { return hosts_.size(); }
  const NetworkNamespace& host(int index) const { return hosts_[index]; }
  std::string address(int host) const;
  double bytes_per_second() const { return options_.megabits_per_second * 1e6 / 8; }  // of a link, in one direction
  LinkBytes bytes(int host) const;

  // The launcher's variables of a process on `host`, where every host has `ranks_per_host` ranks.
  Variables variables(int host, int local_rank, int ranks_per_host) const;

 private:
  void connect(int host) const;

  LinkOptions options_;
  NetworkNamespace switch_;
  IntVector<NetworkNamespace> hosts_;
};

// What TCP gets through the links between hosts 0 and 1, in bytes of data per second and direction, while both send.
double measured_bytes_per_second(const Network& network);

// Seconds of this machine's cores that each byte of such a stream takes more than over loopback, frames with headers counted: to
// cut, shape, switch and put together.
double measured_work_of_byte(const Network& network);

// Seconds that a byte takes from host 0 to host 1 more than over loopback: half the difference of the round trips.
double measured_latency(const Network& network);

std::string congestion_control(const LinkOptions& options);  // the one in use

void add_link_options(Program& program, LinkOptions& link);  // --rate, --congestion-control

}  // namespace lockstep::bench
