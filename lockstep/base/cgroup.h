// SPDX-License-Identifier: Apache-2.0
// base/cgroup.h: the cgroups that this process is in, in which Kubernetes, Slurm and systemd limit it.
//
// Flow:    /proc/self/cgroup -> here -> memory_room.h, cpu_quota.h
// Threads: any
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace lockstep {

enum class CgroupVersion { k1, k2 };

// Calls visit(folder, version) for each folder of the hierarchies that have `controller` ("memory"): that of this process
// first, then those above it. In a container the path may be one of the machine outside: then only the mount itself is
// there, and the other folders do not exist.
void for_each_cgroup(const std::string& controller, const std::filesystem::path& mount,
                     const std::filesystem::path& membership,
                     const std::function<void(const std::filesystem::path&, CgroupVersion)>& visit);

}  // namespace lockstep
