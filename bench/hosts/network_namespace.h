// SPDX-License-Identifier: Apache-2.0
// bench/hosts/network_namespace.h: a network with interfaces, addresses and ports of its own.
//
// Owns:    a descriptor, no name: the kernel removes the namespace and its interfaces with the last descriptor or process
//          that holds it, so nothing is left behind however this program ends
// Threads: any; enter() moves the calling one
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/launch/process.h"

namespace lockstep::bench {

class NetworkNamespace {
 public:
  NetworkNamespace();  // its loopback device is down. Throws SystemError: not root

  // The calling thread, and what it starts, live here from now on.
  void enter() const;

  // Runs `body` on a thread that lives here, and throws what it throws.
  void run(const std::function<void()>& body) const;

  // A process that runs a program here; command[0] is its path. This must outlive its start.
  ProcessOptions inside(const std::vector<std::string>& command) const;

  // Runs lines of sh here up to the first that fails. Throws SystemError.
  void shell(const std::string& script) const;

  std::string path() const;  // what ip's `netns` takes, while this lives

 private:
  UniqueFd fd_;
};

}  // namespace lockstep::bench
