// SPDX-License-Identifier: Apache-2.0
// collective/machines/listener_filter.h: who may connect to a socket that somebody else listens at: Gloo, which reads a
// number from whoever connects before TLS begins, and ends the process when there are no descriptors left.
//
// Flow:    gloo_device.h -> here -> the kernel, which drops the packets of everybody else
// Owns:    a descriptor of the socket
// Threads: one at a time
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

class ListenerFilter {
 public:
  // Finds this process's socket that listens at `address`. Throws SystemError: there is none.
  explicit ListenerFilter(const sockaddr_storage& address);

  // Addresses as numbers; those of another family than the socket's don't matter. Connections that are made already are
  // not affected. Throws SystemError.
  void admit_only(const std::vector<std::string>& addresses) const;
  void admit_nobody() const { admit_only({}); }

 private:
  int family_;
  UniqueFd listener_;
};

}  // namespace lockstep
