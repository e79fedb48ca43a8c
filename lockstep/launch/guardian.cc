// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/guardian.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <new>

#include "lockstep/error.h"
#include "lockstep/launch/process.h"

namespace lockstep {
namespace {

using Groups = std::span<std::atomic<pid_t>>;
static_assert(std::atomic<pid_t>::is_always_lock_free, "shared between processes");

Groups share_groups(std::size_t count) {
  void* memory =
      ::mmap(nullptr, count * sizeof(Groups::element_type), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw system_error("map", "memory for the ranks' process groups");
  return {new (memory) std::atomic<pid_t>[count] {}, count};
}

// Leaves the launcher's session, so that Ctrl-C does not reach it, and its descriptors, so that whoever reads the
// launcher's output sees the end of it. `launcher` becomes descriptor 0.
void detach(int launcher) {
  ::setsid();
  ::prctl(PR_SET_NAME, "lockstep-guard");
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  ::dup2(launcher, 0);
  ::close_range(1, std::numeric_limits<unsigned>::max(), 0);
}

[[noreturn]] void guard(int launcher, Groups groups) {
  detach(launcher);
  pollfd end{.fd = 0, .events = POLLIN, .revents = 0};
  // Without a deadline: this process exists to wait for the launcher's end, and the launcher's destructor kills it.
  while (::poll(&end, 1, -1) < 0 && errno == EINTR) {
  }
  for (const auto& group : groups)
    if (const pid_t id = group.load(); id > 0) ::kill(-id, SIGKILL);
  ::_exit(0);
}

}  // namespace

Guardian::Guardian(int ranks) {
  const UniqueFd launcher = open_pidfd(::getpid());
  groups_ = share_groups(to_size(ranks));
  pid_ = ::fork();
  if (pid_ == 0) guard(launcher.get(), groups_);
  if (pid_ > 0) return;
  ::munmap(groups_.data(), groups_.size_bytes());
  throw system_error("start", "the process that cleans up after this one");
}

Guardian::~Guardian() {
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {  // bounded: it was killed
  }
  ::munmap(groups_.data(), groups_.size_bytes());
}

}  // namespace lockstep
