// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/cpu_quota.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "lockstep/base/cgroup.h"
#include "lockstep/cores.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Microseconds of CPU time per period. "max" and -1 are no limit.
std::optional<double> quota_in(const fs::path& cgroup, CgroupVersion version) {
  double quota = 0, period = 0;
  bool read = false;
  if (version == CgroupVersion::k2) {
    std::ifstream in(cgroup / "cpu.max");
    read = static_cast<bool>(in >> quota >> period);
  } else {
    std::ifstream quota_file(cgroup / "cpu.cfs_quota_us"), period_file(cgroup / "cpu.cfs_period_us");
    read = quota_file >> quota && period_file >> period;
  }
  return read && quota > 0 && period > 0 ? std::optional(quota / period) : std::nullopt;
}

}  // namespace

std::optional<double> cpu_quota(const fs::path& mount, const fs::path& membership) {
  std::optional<double> smallest;
  for_each_cgroup("cpu", mount, membership, [&smallest](const fs::path& cgroup, CgroupVersion version) {
    const auto quota = quota_in(cgroup, version);
    if (quota) smallest = std::min(*quota, smallest.value_or(*quota));
  });
  return smallest;
}

int usable_core_count(std::optional<double> quota) {
  const int cores = static_cast<int>(usable_cores().size());
  return quota && *quota < cores ? std::max(1, static_cast<int>(std::ceil(*quota))) : cores;
}

}  // namespace lockstep
