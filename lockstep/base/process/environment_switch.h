// SPDX-License-Identifier: Apache-2.0
// base/process/environment_switch.h: environment variables that hold a number, or switch off a side effect on the
// process (docs/process.md lists those).
//
// Threads: any, as long as no thread calls setenv
#pragma once

#include <cstdlib>

#include "lockstep/base/text.h"

namespace lockstep {

inline bool is_switched_off(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "0";
}

inline int number_in_variable(const char* variable, int otherwise = 0) {
  const char* value = std::getenv(variable);
  int number = 0;
  return value != nullptr && parse_int(value, number) ? number : otherwise;
}

}  // namespace lockstep
