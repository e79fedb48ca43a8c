// SPDX-License-Identifier: Apache-2.0
// base/process/environment_switch.h: environment variables that switch a side effect on the process off; docs/process.md lists
// them.
//
// Threads: any, as long as no thread calls setenv
#pragma once

#include <cstdlib>
#include <string_view>

namespace lockstep {

inline bool is_switched_off(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "0";
}

}  // namespace lockstep
