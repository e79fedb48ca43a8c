// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/files/proc_file.h"

#include <cstdlib>
#include <fstream>

namespace lockstep {

std::string proc_value(const std::string& file, std::string_view name) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(name))
      if (const auto at = line.find_first_not_of(" \t", line.find(':') + 1); at != std::string::npos)
        return line.substr(at);
  return "";
}

double proc_bytes(const std::string& file, std::string_view name) {
  return 1024 * std::strtod(proc_value(file, name).c_str(), nullptr);
}

}  // namespace lockstep
