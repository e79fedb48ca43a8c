// SPDX-License-Identifier: Apache-2.0
// base/require.h: a check of options or arguments.
//
// Threads: any
#pragma once

#include "lockstep/error.h"

namespace lockstep {

// Throws UsageError where it does not hold. The texts are made in any case: not for what every step calls.
inline void require(bool holds, const std::string& what, const std::string& next) {
  if (!holds) throw UsageError({.what = what, .next = next});
}

}  // namespace lockstep
