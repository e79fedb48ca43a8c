// SPDX-License-Identifier: Apache-2.0
// tests/train/command.h: the command line of a program that a test starts, and the metrics it wrote.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"

namespace lockstep::testing {

using Words = std::vector<std::string>;

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// `command` with more variables in its environment.
inline Words with_variables(const std::map<std::string, std::string>& variables, const Words& command) {
  Words words = {"/usr/bin/env"};
  for (const auto& [name, value] : variables) words.push_back(name + "=" + value);
  return words + command;
}

inline std::vector<nlohmann::json> metrics_in(const std::filesystem::path& path) {
  std::vector<nlohmann::json> lines;
  for (const auto& line : split(read_file(path), '\n'))
    if (!line.empty()) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

// The loss of every step: equal losses mean equal training.
inline std::vector<double> losses_in(const std::filesystem::path& path) {
  std::vector<double> losses;
  for (const auto& line : metrics_in(path))
    if (line["event"] == "step") losses.push_back(line["loss"]);
  return losses;
}

// How many steps a running program has written.
inline size_t steps_in(const std::filesystem::path& path) {
  try {
    return losses_in(path).size();
  } catch (const std::exception&) {  // no file yet, or a line half written
    return 0;
  }
}

}  // namespace lockstep::testing
