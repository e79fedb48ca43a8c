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

constexpr const char* kCoresFolder = "/sys/devices/system/cpu";

// Places by core number.
std::vector<CorePlace> read_core_places(const std::filesystem::path& folder = kCoresFolder);
const std::vector<CorePlace>& core_places();  // of this machine, read once

bool has_several_nodes(const std::vector<CorePlace>& places);
CorePlace place_of(int core, const std::vector<CorePlace>& places);
CoreSet neighbours_first(CoreSet cores, const std::vector<CorePlace>& places);

// cores_of_rank() of cores in the order of neighbours.
CoreSet share_of(const CoreSet& near, int rank, int ranks);

// Shows the packages and NUMA nodes of these cores, and which of them each rank gets.
std::string draw_machine(const CoreSet& cores, int ranks, const std::filesystem::path& folder = kCoresFolder);

}  // namespace lockstep
