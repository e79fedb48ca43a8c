// SPDX-License-Identifier: Apache-2.0
// base/process/host_name.h: the name of this machine, as gethostname() has it.
//
// Threads: any
#pragma once

#include <unistd.h>

#include <array>
#include <climits>
#include <string>

namespace lockstep {

inline std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace lockstep
