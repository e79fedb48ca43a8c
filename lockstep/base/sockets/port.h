// SPDX-License-Identifier: Apache-2.0
// base/sockets/port.h: reserves a port of this machine, and says which addresses are this machine's alone.
//
// Owns:    a ReservedPort a socket
// Threads: any
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

// Tells whether an address is of the loopback interface: "localhost", "::1", "127.0.1.1". Other names are not looked up.
bool is_loopback(std::string_view host);

// Who has the other end of a connection over IPv4 on the loopback interface. None: that end is closed.
std::optional<uid_t> user_of_other_end(int fd);

// A port of an address of this machine, bound without listening: the kernel gives it to no program that asks for any port while this
// lives, and rank 0 can still bind it, because it sets SO_REUSEADDR too.
class ReservedPort {
 public:
  explicit ReservedPort(const std::string& address = "127.0.0.1");  // a number; throws SystemError
  int number() const { return number_; }

 private:
  UniqueFd fd_;
  int number_ = 0;
};

}  // namespace lockstep
