// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/memory_room.h"

#include <sys/sysinfo.h>

#include <fstream>

#include "lockstep/base/cgroup.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// What the files of a version are called.
struct MemoryFiles {
  const char* limit;
  const char* used;
  const char* prefix;  // of the lines in memory.stat that count children too
};
constexpr MemoryFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"};
constexpr MemoryFiles kVersion2{"memory.max", "memory.current", ""};

// Nothing where there is no such file, or no number in it ("max").
std::optional<std::uint64_t> number_in(const fs::path& file) {
  std::ifstream in(file);
  std::uint64_t number = 0;
  return in >> number ? std::optional(number) : std::nullopt;
}

// File cache. Shared memory is not part of it.
std::uint64_t reclaimable(const fs::path& stat, const std::string& prefix) {
  std::ifstream in(stat);
  std::string name;
  std::uint64_t bytes = 0;
  for (std::uint64_t value = 0; in >> name >> value;)
    if (name == prefix + "inactive_file" || name == prefix + "active_file") bytes += value;
  return bytes;
}

std::optional<MemoryRoom> room_in(const fs::path& cgroup, const MemoryFiles& files) {
  const auto limit = number_in(cgroup / files.limit);
  const auto used = number_in(cgroup / files.used);
  if (!limit || !used) return std::nullopt;
  const std::uint64_t kept = *used - std::min(*used, reclaimable(cgroup / "memory.stat", files.prefix));
  return MemoryRoom{.limit = *limit, .left = *limit - std::min(*limit, kept), .cgroup = cgroup};
}

std::uint64_t free_swap() {
  struct sysinfo machine {};
  return ::sysinfo(&machine) == 0 ? std::uint64_t{machine.freeswap} * machine.mem_unit : 0;
}

}  // namespace

std::optional<MemoryRoom> memory_room(const fs::path& mount, const fs::path& membership) {
  std::optional<MemoryRoom> tightest;
  for_each_cgroup("memory", mount, membership, [&tightest](const fs::path& cgroup, CgroupVersion version) {
    const auto room = room_in(cgroup, version == CgroupVersion::k1 ? kVersion1 : kVersion2);
    if (room && (!tightest || room->left < tightest->left)) tightest = room;
  });
  return tightest;
}

void require_memory_room(std::uint64_t bytes, const std::optional<MemoryRoom>& room) {
  if (!room || bytes <= room->left + free_swap()) return;
  throw SystemError({.what = concat("can't take ", human_bytes(bytes), " of shared memory: ", human_bytes(room->left),
                                    " are left of the ", human_bytes(room->limit), " that this cgroup may use"),
                     .here = room->cgroup.string(),
                     .likely = "a limit of the container or the batch system; above it the kernel kills ranks",
                     .next = "ask for more memory, or start fewer ranks on this machine"});
}

}  // namespace lockstep
