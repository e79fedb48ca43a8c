// SPDX-License-Identifier: Apache-2.0
// agent/meet/insecure_network.h: whether this job's user trusts the network between its machines.
//
// Ranks: the same on all
#pragma once

#include <cstdlib>
#include <string_view>

namespace lockstep {

// LOCKSTEP_INSECURE_NETWORK=1, which --insecure-network sets: nothing is encrypted, and whoever connects is let in.
inline bool network_is_insecure() {
  const char* insecure = std::getenv("LOCKSTEP_INSECURE_NETWORK");
  return insecure != nullptr && std::string_view(insecure) == "1";
}

}  // namespace lockstep
