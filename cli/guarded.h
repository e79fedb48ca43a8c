// cli/guarded.h: what the main() of every program here does around its work: errors go to stderr, and become exit
// codes.
#pragma once

#include <exception>
#include <iostream>

#include "lockstep/error.h"

namespace lockstep {

inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;

// What body() returns; kUsage after a UsageError, kFailed after any other exception.
template <class Body>
int guarded(const Body& body) {
  try {
    return body();
  } catch (const UsageError& error) {
    std::cerr << error.what() << '\n';
    return kUsage;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return kFailed;
  }
}

}  // namespace lockstep
