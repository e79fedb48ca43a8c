// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/slurm.h"

#include <cstdint>

#include "lockstep/base/text.h"

namespace lockstep {

std::optional<int> tasks_of_node(const std::string& text, int node) {
  for (const std::string& part : split(text, ',')) {
    const std::size_t open = part.find("(x");
    int tasks = 0;
    int nodes = 1;
    if (!parse_int(part.substr(0, open), tasks)) return {};
    if (open != std::string::npos && !parse_int(part.substr(open + 2, part.size() - open - 3), nodes)) return {};
    if (node < nodes) return tasks;
    node -= nodes;
  }
  return {};
}

// Of each bracket the first number, which ends at '-' or ','; the list's first entry ends at a ',' outside of brackets.
std::optional<std::string> first_node(const std::string& list) {
  std::string name;
  for (std::size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] == ']') return {};
    if (list[i] != '[') {
      name += list[i];
      continue;
    }
    const std::size_t close = list.find(']', i);
    const std::size_t end = list.find_first_of("-,]", i);
    if (close == std::string::npos || end == i + 1) return {};
    name += list.substr(i + 1, end - i - 1);
    i = close;
  }
  return name.empty() ? std::nullopt : std::optional(name);
}

int first_port_of_step(const std::string& job_id) {
  constexpr int kFirst = 15'000;
  constexpr std::uint64_t kGroups = 1'000;
  std::uint64_t hash = 14695981039346656037U;  // FNV-1a: the same on every machine
  for (const char letter : job_id) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211U;
  return kFirst + static_cast<int>(hash % kGroups) * kStepPorts;
}

}  // namespace lockstep
