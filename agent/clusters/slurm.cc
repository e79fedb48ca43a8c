// SPDX-License-Identifier: Apache-2.0
#include "agent/clusters/slurm.h"

#include <algorithm>
#include <cstdint>

#include "lockstep/base/hash.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using NodeNames = std::vector<std::string>;

// "01-04" -> 01, 02, 03, 04; "7" -> 7. None if it is no range.
NodeNames numbers_in(const std::string& range) {
  constexpr int kMostNodes = 1'000'000;
  const std::size_t dash = range.find('-');
  const std::string first = range.substr(0, dash);
  int number = 0, last = 0;
  if (!parse_int(first, number) || !parse_int(dash == std::string::npos ? first : range.substr(dash + 1), last))
    return {};
  if (number < 0 || last < number || last - number >= kMostNodes) return {};
  NodeNames numbers;
  for (; number <= last; ++number) {
    const std::string digits = std::to_string(number);
    numbers.push_back(std::string(first.size() - std::min(first.size(), digits.size()), '0') + digits);
  }
  return numbers;
}

// One entry: "rack[2-3]n[5-6]". None if it is not of that form.
NodeNames expand(const std::string& entry) {
  const std::size_t open = entry.find_first_of("[]");
  if (open == std::string::npos) return entry.empty() ? NodeNames() : NodeNames{entry};
  const std::size_t close = entry.find(']', open);
  if (entry[open] == ']' || close == std::string::npos) return {};
  const std::string after = entry.substr(close + 1);
  const NodeNames rest = after.empty() ? NodeNames{""} : expand(after);
  NodeNames nodes;
  for (const std::string& range : split(entry.substr(open + 1, close - open - 1), ',')) {
    const NodeNames numbers = numbers_in(range);
    if (numbers.empty()) return {};
    for (const std::string& number : numbers)
      for (const std::string& end : rest) nodes.push_back(entry.substr(0, open) + number + end);
  }
  return nodes;
}

// At the next comma outside of brackets.
std::size_t end_of_entry(const std::string& list, std::size_t begin) {
  std::size_t end = begin;
  for (bool inside = false; end < list.size() && (inside || list[end] != ','); ++end)
    inside = list[end] == '[' || (inside && list[end] != ']');
  return end;
}

}  // namespace

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

std::vector<std::string> nodes_in(const std::string& list) {
  std::vector<std::string> nodes;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = end_of_entry(list, begin);
    const auto more = expand(list.substr(begin, end - begin));
    if (more.empty()) return {};
    nodes.insert(nodes.end(), more.begin(), more.end());
    begin = end + 1;
  }
  return nodes;
}

int first_port_of_step(const std::string& job_id) {
  constexpr int kFirst = 15'000;
  constexpr std::uint64_t kGroups = 1'000;
  return kFirst + static_cast<int>(hash_of(job_id) % kGroups) * kStepPorts;
}

}  // namespace lockstep
