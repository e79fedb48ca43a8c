// SPDX-License-Identifier: Apache-2.0
// base/memory_room.h: how much memory the cgroups of this process leave it. Above their limit the kernel kills.
//
// Threads: any
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace lockstep {

struct MemoryRoom {
  std::uint64_t limit = 0;       // bytes
  std::uint64_t left = 0;        // with the file cache, which the kernel can take back
  std::filesystem::path cgroup;  // the folder of the limit
};

// Of the tightest limit among the process's cgroups (version 1 or 2) and their parents; nothing where none can be read.
std::optional<MemoryRoom> memory_room(const std::filesystem::path& mount = "/sys/fs/cgroup",
                                      const std::filesystem::path& membership = "/proc/self/cgroup");

// Throws SystemError where that and the free swap are less than `bytes`.
void require_memory_room(std::uint64_t bytes, const std::optional<MemoryRoom>& room);

}  // namespace lockstep
