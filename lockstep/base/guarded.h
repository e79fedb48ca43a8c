// SPDX-License-Identifier: Apache-2.0
// base/guarded.h: turns what a command's body throws into a line on stderr and an exit code.
//
// Threads: any
#pragma once

#include <iostream>

#include "lockstep/error.h"

namespace lockstep {

inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;

// What body() returns, or the exit code of what it throws.
template <class Body>
int guarded(const Body& body) {
  try {
    return body();
  } catch (const UsageError& error) {
    std::cerr << error.what() << std::endl;
    return kUsage;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return kFailed;
  }
}

}  // namespace lockstep
