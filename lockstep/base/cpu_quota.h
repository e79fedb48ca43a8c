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

// The number of cores that are usable within a quota.
int core_count_within(std::optional<double> quota);

}  // namespace lockstep
