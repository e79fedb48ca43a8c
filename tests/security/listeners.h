// SPDX-License-Identifier: Apache-2.0
// tests/security/listeners.h: the sockets at which a process and its descendants listen, as the kernel lists them.
#pragma once

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/base/text.h"

namespace lockstep::testing {

// The sockets of the process and its descendants, "socket:[4711]"; empty if it is gone.
inline std::set<std::string> sockets_of(int pid) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::set<std::string> found;
  for (const auto& entry : fs::directory_iterator(concat("/proc/", pid, "/fd"), ignored))
    found.insert(fs::read_symlink(entry, ignored).string());
  for (const auto& thread : fs::directory_iterator(concat("/proc/", pid, "/task"), ignored)) {
    std::ifstream children(thread.path() / "children");
    for (int child = 0; children >> child;) found.merge(sockets_of(child));
  }
  return found;
}

// Of a table in /proc/PID/net: which columns hold the state of a socket, its inode and its name.
struct Table {
  const char* name;
  size_t state, inode, address;
  const char* listens;
};

inline std::set<std::string> listeners_in(const Table& table, int pid) {
  const std::set<std::string> own = sockets_of(pid);
  std::set<std::string> found;
  std::ifstream lines(concat("/proc/", pid, "/net/", table.name));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream stream(line);
    std::vector<std::string> fields;
    for (std::string field; stream >> field;) fields.push_back(field);
    if (fields.size() > std::max(table.inode, table.address) && fields[table.state] == table.listens &&
        own.contains(concat("socket:[", fields[table.inode], "]")))
      found.insert(fields[table.address]);
  }
  return found;
}

// "0100007F:1F90" for each.
inline std::set<std::string> tcp_listeners_of(int pid) {
  std::set<std::string> found = listeners_in({"tcp", 3, 9, 1, "0A"}, pid);
  found.merge(listeners_in({"tcp6", 3, 9, 1, "0A"}, pid));
  return found;
}

// Their names, "@..." or a path.
inline std::set<std::string> unix_listeners_of(int pid) { return listeners_in({"unix", 3, 6, 7, "00010000"}, pid); }

}  // namespace lockstep::testing
