// SPDX-License-Identifier: Apache-2.0
#include "agent/clusters/slurm.h"

#include <cstdint>
#include <regex>

#include "lockstep/base/hash.h"
#include "lockstep/base/text.h"

namespace lockstep {

std::optional<int> tasks_of_node(const std::string& text, int node) {
  for (const std::string& part : split(text, ',')) {
    const size_t open = part.find("(x");
    int tasks = 0;
    int nodes = 1;
    if (!parse_int(part.substr(0, open), tasks)) return {};
    if (open != std::string::npos && !parse_int(part.substr(open + 2, part.size() - open - 3), nodes)) return {};
    if (node < nodes) return tasks;
    node -= nodes;
  }
  return {};
}

std::optional<std::pair<std::string, std::string>> ends_of(const std::string& list) {
  const std::string name = R"((?:[^\[\],]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+)";
  std::smatch match;
  if (!std::regex_match(list, match, std::regex(concat('(', name, ")(?:,(", name, "))*")))) return {};
  const std::string first = match.str(1), last = match[2].matched ? match.str(2) : first;
  return std::pair{std::regex_replace(first, std::regex(R"(\[(\d+)[^\]]*\])"), "$1"),
                   std::regex_replace(last, std::regex(R"(\[[^\]]*?(\d+)\])"), "$1")};
}

int first_port_of_step(const std::string& job_id) {
  constexpr int kFirst = 15'000;
  constexpr uint64_t kGroups = 1'000;
  return kFirst + static_cast<int>(hash_of(job_id) % kGroups) * kStepPorts;
}

}  // namespace lockstep
