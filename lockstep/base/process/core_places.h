// SPDX-License-Identifier: Apache-2.0
// base/process/core_places.h: which cores are neighbours, from the kernel's files about the processor.
//
// Threads: any; nothing is changed
// Ranks:   no communication
#pragma once

#include <filesystem>
#include <vector>

#include "lockstep/cores.h"

namespace lockstep {

// A core's package, NUMA node and number there, which its hardware threads have in common. Sorting puts neighbours
// together.
struct CorePlace {
  int package = -1;  // -1: not known, as in a container without these files
  int node = -1;
  int core = -1;
  auto operator<=>(const CorePlace&) const = default;
};

// Places by core number.
std::vector<CorePlace> read_core_places(const std::filesystem::path& folder = "/sys/devices/system/cpu");

CoreSet neighbours_first(CoreSet cores, const std::vector<CorePlace>& places);

}  // namespace lockstep
