// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/cgroup.h"

#include <algorithm>
#include <fstream>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

void for_each_above(const fs::path& mount, fs::path path, const std::function<void(const fs::path&)>& visit) {
  for (path = path.relative_path();; path = path.parent_path()) {
    visit(mount / path);
    if (path.empty()) return;
  }
}

}  // namespace

// Lines "4:memory:/path" or "5:cpu,cpuacct:/path" (version 1) and "0::/path" (version 2).
void for_each_cgroup(const std::string& controller, const fs::path& mount, const fs::path& membership,
                     const std::function<void(const fs::path&, CgroupVersion)>& visit) {
  std::ifstream in(membership);
  for (std::string line; std::getline(in, line);) {
    const auto parts = split(line, ':');
    if (parts.size() != 3) continue;
    const auto controllers = split(parts[1], ',');
    if (parts[1].empty())
      for_each_above(mount, parts[2], [&](const fs::path& folder) { visit(folder, CgroupVersion::k2); });
    else if (std::ranges::find(controllers, controller) != controllers.end())
      for_each_above(mount / controller, parts[2], [&](const fs::path& folder) { visit(folder, CgroupVersion::k1); });
  }
}

}  // namespace lockstep
