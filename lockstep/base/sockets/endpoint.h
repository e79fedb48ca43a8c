// SPDX-License-Identifier: Apache-2.0
// base/sockets/endpoint.h: a host and a port, looked up, listened at and connected to. Every wait has a deadline, which neither
// the resolver nor connect() has by itself.
//
// Flow:    agent/meet/, collective/meet/job_store.h -> here -> the resolver, sockets
// Owns:    nothing: descriptors are the caller's
// Threads: any
#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <memory>
#include <optional>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"

namespace lockstep {

struct Endpoint {
  std::string host;  // a name or a number
  int port = 0;
  std::string text() const { return concat(host, ":", port); }
};

// "host:29500", "[::1]:29500"; with `port`, also "host". None: neither, or not a port.
std::optional<Endpoint> endpoint_in(std::string text, int port = -1);

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, FreeAddresses>;

struct Lookup {
  int failed;  // getaddrinfo's code; EAI_INPROGRESS: no answer before the deadline
  AddressList addresses;
};
Lookup look_up(const Endpoint& endpoint, const Deadline& deadline);

void set_port(const AddressList& addresses, int port);

// "10.0.0.2": what needs no name server. Throws SystemError.
std::string numeric(const sockaddr* address, socklen_t length);

// The endpoint of a socket's own end, with the host as a number. Throws SystemError.
Endpoint endpoint_of(int fd);

// Returns none if the host is no number.
AddressList address_of_number(const Endpoint& endpoint);

// False: errno says why.
bool bind_to(const UniqueFd& fd, const addrinfo& address);

// A name may have several addresses, of which some are of no use here (::1 where there is no IPv6): at the first where
// that works. None: errno says why the last did not.
UniqueFd listen_at(const AddressList& addresses);

struct Connection {
  UniqueFd fd;          // does not block
  std::string address;  // that has answered, as a number
};
// To all addresses at once, because some may never answer; the first that does. Nothing where none does: errno tells why.
std::optional<Connection> connect_to(const AddressList& addresses, const Deadline& deadline);

// This machine's address on the route to the first of `addresses` that there is one to.
std::optional<std::string> own_address_towards(const AddressList& addresses);

}  // namespace lockstep
