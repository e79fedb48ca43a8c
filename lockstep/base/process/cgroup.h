// SPDX-License-Identifier: Apache-2.0
// base/process/cgroup.h: how much memory and time of cores the cgroups of this process leave it, in which Kubernetes, Slurm and
// systemd limit it.
//
// Flow:    /proc/self/cgroup -> files of the cgroups, version 1 or 2 -> here
// Threads: any
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace lockstep {

struct MemoryRoom {
  uint64_t limit = 0;            // bytes, above which the kernel kills
  uint64_t left = 0;             // with the file cache, which the kernel can take back
  std::filesystem::path cgroup;  // the folder of the limit
};

// Where the kernel shows the cgroups, and which of them are the process's.
struct CgroupFiles {
  std::filesystem::path mount = "/sys/fs/cgroup";
  std::filesystem::path membership = "/proc/self/cgroup";
};

// The tightest limit among the process's cgroups and their parents; nothing where none can be read.
std::optional<MemoryRoom> memory_room(const CgroupFiles& files = {});

// Throws SystemError where that and the free swap are less than `bytes`.
void require_memory_room(uint64_t bytes, const std::optional<MemoryRoom>& room);

// How many cores' time this process may use, whichever cores that is (Kubernetes' limits.cpu, Docker's --cpus), such as 2.5;
// nothing where there is no limit.
std::optional<double> cpu_quota(const CgroupFiles& files = {});

// How many cores this process may keep busy: usable_cores(), or fewer within a quota. Half a core counts as one.
int usable_core_count(std::optional<double> quota = cpu_quota());

}  // namespace lockstep
