// SPDX-License-Identifier: Apache-2.0
// tests/security/listeners.h: the TCP sockets at which a process and its descendants listen, as the kernel lists them.
#pragma once

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/base/text.h"

namespace lockstep::testing {

// "0100007F:1F90" for each; empty if the process is gone.
inline std::set<std::string> tcp_listeners_of(int pid) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::set<std::string> own, found;
  for (const auto& entry : fs::directory_iterator(concat("/proc/", pid, "/fd"), ignored))
    own.insert(fs::read_symlink(entry, ignored).string());
  for (const char* table : {"tcp", "tcp6"}) {
    std::ifstream lines(concat("/proc/", pid, "/net/", table));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream stream(line);
      std::vector<std::string> fields;
      for (std::string field; stream >> field;) fields.push_back(field);
      if (fields.size() > 9 && fields[3] == "0A" && own.contains(concat("socket:[", fields[9], "]")))
        found.insert(fields[1]);
    }
  }
  for (const auto& thread : fs::directory_iterator(concat("/proc/", pid, "/task"), ignored)) {
    std::ifstream children(thread.path() / "children");
    for (int child = 0; children >> child;) found.merge(tcp_listeners_of(child));
  }
  return found;
}

}  // namespace lockstep::testing
