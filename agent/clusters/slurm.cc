// SPDX-License-Identifier: Apache-2.0
#include "agent/clusters/slurm.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lockstep/base/hash.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

bool is_digit(char each) { return each >= '0' && each <= '9'; }

// "n[01-03,7]" -> "n01", or "n7" of its last node. Nothing: it is not a name.
std::optional<std::string> end_of(std::string name, bool last) {
  for (size_t open = 0; (open = name.find('[')) != std::string::npos;) {
    const size_t close = std::min(name.find(']', open), name.size());
    const std::string numbers = name.substr(open + 1, close - open - 1);
    const std::string number =
        last ? numbers.substr(numbers.find_last_of(",-") + 1) : numbers.substr(0, numbers.find_first_of(",-"));
    if (close == name.size() || number.empty() || !std::ranges::all_of(number, is_digit)) return {};
    name.replace(open, close - open + 1, number);
  }
  if (name.empty() || name.find(']') != std::string::npos) return {};
  return name;
}

}  // namespace

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
  std::vector<std::string> names(1);
  bool in_numbers = false;
  for (const char each : list) {
    in_numbers = each == '[' || (in_numbers && each != ']');
    if (each == ',' && !in_numbers)
      names.emplace_back();
    else
      names.back() += each;
  }
  const auto first = end_of(names.front(), false), last = end_of(names.back(), true);
  if (!first || !last) return {};
  return std::pair{*first, *last};
}

int first_port_of_step(const std::string& job_id) {
  constexpr int kFirst = 15'000;
  constexpr uint64_t kGroups = 1'000;
  return kFirst + static_cast<int>(hash_of(job_id) % kGroups) * kStepPorts;
}

}  // namespace lockstep
