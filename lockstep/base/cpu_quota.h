// SPDX-License-Identifier: Apache-2.0
// base/cpu_quota.h: how many cores' time this process's cgroups let it use, whichever cores that is: Kubernetes'
// limits.cpu, Docker's --cpus.
//
// Threads: any
#pragma once

#include <filesystem>
#include <optional>

namespace lockstep {

// In cores, such as 2.5; nothing where there is no limit.
std::optional<double> cpu_quota(const std::filesystem::path& mount = "/sys/fs/cgroup",
                                const std::filesystem::path& membership = "/proc/self/cgroup");

// How many cores this process may keep busy: usable_cores(), or fewer within a quota. Half a core counts as one.
int usable_core_count(std::optional<double> quota = cpu_quota());

}  // namespace lockstep
