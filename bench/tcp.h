// SPDX-License-Identifier: Apache-2.0
// bench/tcp.h: a TCP connection between two ends of this process, to measure what sockets cost.
//
// Threads: values
#pragma once

#include <functional>
#include <string>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep::bench {

struct TcpConnection {
  UniqueFd from;  // the end that connected
  UniqueFd to;    // the end that accepted
};

// Runs its argument in the network where a socket is to be made: a socket stays in the network of its thread.
using InNetwork = std::function<void(const std::function<void()>&)>;

// Connects to `address` of this machine or of a network on it; a read or write that waits longer than 5 s fails.
// Throws SystemError.
TcpConnection connect_over_tcp(const std::string& address, const InNetwork& from, const InNetwork& to);

TcpConnection connect_on_loopback();

// Median seconds of one byte there and back; the connection can't be used after that. Throws SystemError.
double round_trip(const TcpConnection& ends);

// The same on 127.0.0.1: the floor of everything that goes through sockets on this machine.
double loopback_round_trip();

// Throws SystemError with errno unless `fine`.
void require_measured(bool fine);

}  // namespace lockstep::bench
