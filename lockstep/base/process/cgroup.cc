// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/cgroup.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>

#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

void for_each_above(const fs::path& mount, fs::path path, const std::function<void(const fs::path&)>& visit) {
  for (path = path.relative_path();; path = path.parent_path()) {
    visit(mount / path);
    if (path.empty()) return;
  }
}

// Calls visit(folder, version) for each folder of the hierarchies that have `controller` ("memory"): that of this process
// first, then those above it. In a container the path may be one of the machine outside: then only the mount itself is
// there, and the other folders do not exist.
//
// The file has lines "4:memory:/path" or "5:cpu,cpuacct:/path" (version 1) and "0::/path" (version 2).
void for_each_cgroup(const std::string& controller, const CgroupFiles& files,
                     const std::function<void(const fs::path&, int version)>& visit) {
  std::ifstream in(files.membership);
  for (std::string line; std::getline(in, line);) {
    const auto parts = split(line, ':');
    if (parts.size() != 3) continue;
    const auto controllers = split(parts[1], ',');
    if (parts[1].empty())
      for_each_above(files.mount, parts[2], [&](const fs::path& folder) { visit(folder, 2); });
    else if (std::ranges::find(controllers, controller) != controllers.end())
      for_each_above(files.mount / controller, parts[2], [&](const fs::path& folder) { visit(folder, 1); });
  }
}

// ---- Memory

// Names of a version's files.
struct MemoryFiles {
  const char* limit;
  const char* used;
  const char* prefix;  // of the lines in memory.stat that count children too
};
constexpr MemoryFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"};
constexpr MemoryFiles kVersion2{"memory.max", "memory.current", ""};

// Returns nothing where there is no such file, or no number in it ("max").
std::optional<uint64_t> number_in(const fs::path& file) {
  std::ifstream in(file);
  uint64_t number = 0;
  return in >> number ? std::optional(number) : std::nullopt;
}

// File cache. Shared memory is not part of it.
uint64_t reclaimable(const fs::path& stat, const std::string& prefix) {
  std::ifstream in(stat);
  std::string name;
  uint64_t bytes = 0;
  for (uint64_t value = 0; in >> name >> value;)
    if (name == prefix + "inactive_file" || name == prefix + "active_file") bytes += value;
  return bytes;
}

std::optional<MemoryRoom> room_in(const fs::path& cgroup, const MemoryFiles& files) {
  const auto limit = number_in(cgroup / files.limit);
  const auto used = number_in(cgroup / files.used);
  if (!limit || !used) return std::nullopt;
  const uint64_t kept = *used - std::min(*used, reclaimable(cgroup / "memory.stat", files.prefix));
  return MemoryRoom{.limit = *limit, .left = *limit - std::min(*limit, kept), .cgroup = cgroup};
}

uint64_t free_swap() {
  struct sysinfo machine {};
  return ::sysinfo(&machine) == 0 ? uint64_t{machine.freeswap} * machine.mem_unit : 0;
}

// ---- Cores

// Microseconds of CPU time per period. "max" and -1 are no limit.
std::optional<double> quota_in(const fs::path& cgroup, int version) {
  double quota = 0, period = 0;
  bool read = false;
  if (version == 2) {
    std::ifstream in(cgroup / "cpu.max");
    read = static_cast<bool>(in >> quota >> period);
  } else {
    std::ifstream quota_file(cgroup / "cpu.cfs_quota_us"), period_file(cgroup / "cpu.cfs_period_us");
    read = quota_file >> quota && period_file >> period;
  }
  return read && quota > 0 && period > 0 ? std::optional(quota / period) : std::nullopt;
}

}  // namespace

std::optional<MemoryRoom> memory_room(const CgroupFiles& files) {
  std::optional<MemoryRoom> tightest;
  for_each_cgroup("memory", files, [&tightest](const fs::path& cgroup, int version) {
    const auto room = room_in(cgroup, version == 1 ? kVersion1 : kVersion2);
    if (room && (!tightest || room->left < tightest->left)) tightest = room;
  });
  return tightest;
}

void require_memory_room(uint64_t bytes, const std::optional<MemoryRoom>& room) {
  if (!room || bytes <= room->left + free_swap()) return;
  throw SystemError({.what = concat("can't take ", human_bytes(bytes), " of shared memory: ", human_bytes(room->left),
                                    " are left of the ", human_bytes(room->limit), " that this cgroup may use"),
                     .here = room->cgroup.string(),
                     .likely = "a limit of the container or the batch system; above it the kernel kills ranks",
                     .next = "ask for more memory, or start fewer ranks on this machine"});
}

std::optional<double> cpu_quota(const CgroupFiles& files) {
  std::optional<double> smallest;
  for_each_cgroup("cpu", files, [&smallest](const fs::path& cgroup, int version) {
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
