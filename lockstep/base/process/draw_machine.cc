// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "lockstep/base/process/core_places.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

std::string word_in(const fs::path& file) {
  std::string word;
  std::ifstream(file) >> word;
  return word;
}

// "32 x L1 48K, 32 x L2 2048K, 4 x L3 32768K"
std::string caches_of(const CoreSet& cores, const fs::path& folder) {
  std::map<std::string, std::set<std::string>> users;  // by level and size: those of each
  for (const int core : cores)
    for (int i = 0;; ++i) {
      const fs::path cache = folder / concat("cpu", core, "/cache/index", i);
      const std::string type = word_in(cache / "type");
      if (type.empty()) break;
      if (type != "Instruction")
        users[concat('L', word_in(cache / "level"), ' ', word_in(cache / "size"))].insert(
            word_in(cache / "shared_cpu_list"));
    }
  std::string text;
  for (const auto& [name, each] : users) text += concat(", ", each.size(), " x ", name);
  return text;
}

}  // namespace

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
  std::string text =
      concat("machine: ", all.size(), " cores, ", cores.size(), " hardware threads", caches_of(cores, folder), '\n');
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
