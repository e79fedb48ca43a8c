// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/files/proc_file.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"

namespace lockstep {

std::string proc_value(const std::string& file, std::string_view name) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(name))
      if (const auto at = line.find_first_not_of(" \t", line.find(':') + 1); at != std::string::npos)
        return line.substr(at);
  return "";
}

std::vector<std::string> fields_of_stat(const std::string& file) {
  const std::string stat = read_file(file);
  return split(std::string_view(stat).substr(std::min(stat.rfind(')') + 2, stat.size())), ' ');
}

double proc_bytes(const std::string& file, std::string_view name) {
  return 1024 * std::strtod(proc_value(file, name).c_str(), nullptr);
}

}  // namespace lockstep
