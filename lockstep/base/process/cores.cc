// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "lockstep/base/process/core_places.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

int id_in(const fs::path& file) {
  int number = -1;
  std::ifstream(file) >> number;
  return number;
}

// A core's folder has a link to that of its NUMA node.
int numa_node_of(const fs::path& core) {
  constexpr std::string_view kNode = "node";
  std::error_code ignored;
  int node = -1;
  for (const auto& entry : fs::directory_iterator(core, ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(kNode) && parse_int(std::string_view(name).substr(kNode.size()), node)) return node;
  }
  return -1;
}

}  // namespace

std::vector<CorePlace> read_core_places(const fs::path& folder) {
  std::vector<CorePlace> places;
  std::error_code ignored;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    const fs::path here = folder / ("cpu" + std::to_string(core));
    if (!fs::exists(here, ignored)) continue;
    places.resize(to_size(core) + 1);
    places.back() = {.package = id_in(here / "topology/physical_package_id"),
                     .node = numa_node_of(here),
                     .core = id_in(here / "topology/core_id")};
  }
  return places;
}

const std::vector<CorePlace>& core_places() {
  static const std::vector<CorePlace> places = read_core_places();
  return places;
}

bool has_several_nodes(const std::vector<CorePlace>& places) {
  std::set<int> nodes;
  for (const CorePlace& place : places) nodes.insert(place.node);
  nodes.erase(-1);
  return nodes.size() > 1;
}

CorePlace place_of(int core, const std::vector<CorePlace>& places) {
  return to_size(core) < places.size() ? places[to_size(core)] : CorePlace{};
}

CoreSet neighbours_first(CoreSet cores, const std::vector<CorePlace>& places) {
  std::ranges::stable_sort(cores, {}, [&](int core) { return place_of(core, places); });
  return cores;
}

CoreSet usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) throw system_error("read", "this process's cores");
  CoreSet cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

CoreSet cores_of_rank(const CoreSet& all, int rank, int ranks) {
  return share_of(neighbours_first(all, core_places()), rank, ranks);
}

CoreSet share_of(const CoreSet& near, int rank, int ranks) {
  const int cores = static_cast<int>(near.size());
  if (ranks >= cores) return {near[to_size(rank % cores)]};
  const auto begin = near.begin() + static_cast<ptrdiff_t>(rank) * cores / ranks;
  const auto end = near.begin() + static_cast<ptrdiff_t>(rank + 1) * cores / ranks;
  CoreSet mine(begin, end);
  std::ranges::sort(mine);
  return mine;
}

void pin_this_thread(const CoreSet& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0) throw system_error("pin a thread to cores", to_string(cores));
}

std::string to_string(const CoreSet& cores) {
  std::string text;
  for (size_t i = 0; i < cores.size();) {
    size_t last = i;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(cores[i]);
    if (last > i) text += '-' + std::to_string(cores[last]);
    i = last + 1;
  }
  return text;
}

std::string draw_machine(const CoreSet& cores, int ranks, const fs::path& folder) {
  const std::vector<CorePlace> places = read_core_places(folder);
  const CoreSet near = neighbours_first(cores, places);
  std::map<CorePlace, CoreSet> nodes;  // hardware threads by package and node
  std::set<CorePlace> all;
  for (const int core : cores) {
    CorePlace place = place_of(core, places);
    if (place.core < 0) place.core = core;
    nodes[{place.package, place.node}].push_back(core);
    all.insert(place);
  }
  std::string text = concat("machine: ", all.size(), " cores, ", cores.size(), " hardware threads\n");
  for (const auto& [place, here] : nodes) {
    text += concat("  package ", place.package, ", NUMA node ", place.node, ": ", to_string(here), '\n');
    for (int rank = 0; rank < ranks; ++rank) {
      CoreSet mine;
      std::ranges::set_intersection(share_of(near, rank, ranks), here, std::back_inserter(mine));
      if (!mine.empty()) text += concat("    rank ", rank, ": ", to_string(mine), '\n');
    }
  }
  return text;
}

}  // namespace lockstep
