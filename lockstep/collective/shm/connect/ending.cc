// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/ending.h"

#include <sys/ioctl.h>
#include <sys/wait.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <optional>

#include "lockstep/base/text.h"

namespace lockstep::shm {
namespace {

// From <linux/pidfd.h> of Linux 6.15: how a process ended, after its parent collected it.
struct PidfdInfo {
  std::uint64_t mask;
  std::uint64_t cgroup;
  std::uint32_t pid, tgid, ppid;
  std::array<std::uint32_t, 8> ids;
  std::int32_t exit_code;
};
constexpr unsigned long kGetInfo = _IOWR(0xFF, 11, PidfdInfo);
constexpr std::uint64_t kInfoExit = 1U << 3;

std::optional<int> status_of_collected(int pidfd) {
  PidfdInfo info{};
  info.mask = kInfoExit;
  if (::ioctl(pidfd, kGetInfo, &info) != 0 || (info.mask & kInfoExit) == 0) return std::nullopt;
  return info.exit_code;
}

// Before its parent collected it, a process is a zombie, and the last field of /proc/PID/stat is its status.
std::optional<int> status_of_zombie(pid_t pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || line.compare(name_end, 3, ") Z") != 0) return std::nullopt;
  int status = 0;
  const std::vector<std::string> fields = split(line, ' ');
  return parse_int(fields.back(), status) ? std::optional(status) : std::nullopt;
}

std::string describe(int status) {
  if (WIFSIGNALED(status)) return concat("killed by signal ", WTERMSIG(status));
  return concat("exited with code ", WEXITSTATUS(status));
}

}  // namespace

std::string how_it_ended(int pidfd, pid_t pid) {
  std::optional<int> status = status_of_collected(pidfd);
  if (!status) status = status_of_zombie(pid);
  if (!status) status = status_of_collected(pidfd);  // collected meanwhile
  return status ? describe(*status) : "ended";
}

}  // namespace lockstep::shm
