// SPDX-License-Identifier: Apache-2.0
// base/guarded.h: turns what a command's body throws into a line on stderr and an exit code.
//
// Threads: any
#pragma once

#include <cstdlib>
#include <iostream>
#include <string>

#include "lockstep/error.h"

namespace lockstep {

inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;

// An error of libtorch carries a backtrace, which is printed where torch's own variable asks for it.
inline std::string without_backtrace(const std::string& text) {
  const char* const asked = std::getenv("TORCH_SHOW_CPP_STACKTRACES");
  return asked != nullptr && *asked == '1' ? text : text.substr(0, text.find("\nException raised from "));
}

// Returns what body() returns, or the exit code of what it throws.
template <class Body>
int guarded(const Body& body) {
  try {
    return body();
  } catch (const UsageError& error) {
    std::cerr << error.what() << std::endl;
    return kUsage;
  } catch (const std::exception& error) {
    std::cerr << without_backtrace(error.what()) << std::endl;
    return kFailed;
  }
}

}  // namespace lockstep
