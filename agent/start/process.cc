// SPDX-License-Identifier: Apache-2.0
#include "agent/start/process.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstring>
#include <filesystem>
#include <limits>

#include "lockstep/base/files/write_all.h"
#include "lockstep/base/guarded.h"
#include "lockstep/base/pipe.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

// If the parent died before the prctl, its signal never comes: so look again whether the parent is still there.
void die_with(pid_t parent) {
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) throw system_error("tie to its parent", "a child process");
  if (::getppid() != parent) ::_exit(kFailed);
}

void redirect(int from, int to) {
  if (from >= 0 && ::dup2(from, to) < 0) throw system_error("redirect", concat("descriptor ", to));
}

// Prepares the child for its program. The group is written down before the look at the parent: either whoever
// cleans up after a dead parent finds the group, or the child sees that its parent is gone.
void set_up(const ProcessOptions& options, pid_t parent) {
  if (::setpgid(0, 0) != 0) throw system_error("make a process group for", "a child process");
  if (options.group != nullptr) options.group->store(::getpid());
  die_with(parent);
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!nothing) throw system_error("open", "/dev/null");
  const bool to_terminal = ::isatty(STDOUT_FILENO) != 0;
  redirect(options.input_fd >= 0 ? options.input_fd : nothing.get(), STDIN_FILENO);
  redirect(options.output_fd, STDOUT_FILENO);
  redirect(options.error_fd, STDERR_FILENO);
  if (to_terminal && options.body) std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a line is shown when it is printed
  for (const auto& [name, value] : options.variables) ::setenv(name.c_str(), value.c_str(), 1);
  if (!options.cores.empty()) pin_this_thread(options.cores);
  ::sigprocmask(SIG_SETMASK, &options.signal_mask, nullptr);
}

void execute(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments.front(), arguments.data());
  throw system_error("start", command.front());
}

// Exits without running the destructors and atexit handlers copied from the parent: they would clean up its things.
[[noreturn]] void exit_after(const std::function<int()>& body) {
  const int code = guarded(body);
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(code);
}

// The parent reads `report`: text if the child could not start, its end when it has (exec closes it).
[[noreturn]] void be_child(const ProcessOptions& options, pid_t parent, UniqueFd report) {
  try {
    set_up(options, parent);
    if (!options.body) execute(options.command);
  } catch (const Error& error) {
    write_all(report.get(), error.text().what);
    ::_exit(kFailed);
  }
  if (options.keeps)
    for (const int fd : all_descriptors())
      if (fd > STDERR_FILENO && fd != report.get() && !options.keeps->contains(fd)) ::close(fd);
  report.reset();
  exit_after(options.body);
}

// Takes a child that was killed or has reported its error: only the kernel is waited for, so no deadline.
void wait_for(pid_t pid) {
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

UniqueFd open_pidfd(pid_t pid) {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // close-on-exec by itself
  if (!fd) throw system_error("watch", concat("process ", pid));
  return fd;
}

// The program's file may lie where no answer comes from; then the child ignores even SIGKILL, and is not waited for.
[[noreturn]] void give_up(pid_t pid, const ProcessOptions& options) {
  const UniqueFd pidfd = open_pidfd(pid);
  ::kill(pid, SIGKILL);
  if (wait_for(POLLIN, pidfd.get(), Deadline::after(std::chrono::seconds(1)))) wait_for(pid);
  throw SystemError(
      {.what = concat("a child process did not begin its program within ", human_seconds(options.start_timeout)),
       .here = concat("pid ", pid, " ", join(options.command, " ")),
       .likely = "a disk or network file system that does not answer",
       .next = "start the program by hand on this machine"});
}

// ---- The guardian

using Groups = std::span<std::atomic<pid_t>>;
static_assert(std::atomic<pid_t>::is_always_lock_free, "shared between processes");

Groups share_groups(size_t count) {
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
  pollfd end = to_poll(0);
  // Without a deadline: this process exists to wait for the launcher's end, and the launcher's destructor kills it.
  while (::poll(&end, 1, -1) < 0 && errno == EINTR) {
  }
  for (const auto& group : groups)
    if (const pid_t id = group.load(); id > 0) ::kill(-id, SIGKILL);
  ::_exit(0);
}

}  // namespace

// ---- The process

// Without that of the folder itself, which is closed again.
std::set<int> all_descriptors() {
  std::set<int> all;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored))
    if (int fd = 0; parse_int(entry.path().filename().string(), fd)) all.insert(fd);
  std::erase_if(all, [](int fd) { return ::fcntl(fd, F_GETFD) < 0; });
  return all;
}

std::string how_it_ended(const ExitStatus& end) {
  if (end.signal != 0) return concat("was ended by signal ", end.signal, " (", ::strsignal(end.signal), ")");
  return concat("exited with code ", end.exit_code);
}

Process::Process(const ProcessOptions& options) {
  auto [report, write_end] = make_pipe();
  std::cout.flush();
  std::fflush(nullptr);  // or a body's child would write it again
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw system_error("start", "another process");
  if (pid_ == 0) {
    report.reset();
    be_child(options, parent, std::move(write_end));
  }
  write_end.reset();
  // Until the child execs, reports an error or dies, each of which closes its end.
  const auto [trouble, has_begun] = read_to_end_of(report.get(), Deadline::after(options.start_timeout));
  if (!has_begun) give_up(pid_, options);
  if (!trouble.empty()) {
    wait_for(pid_);
    throw SystemError({.what = trouble,
                       .here = join(options.command, " "),
                       .likely = "a misspelt name, one that is not in PATH, or a file that is not executable",
                       .next = "check the name, and that the file is executable on this machine"});
  }
  pidfd_ = open_pidfd(pid_);
}

Process::~Process() {
  if (pid_ < 0) return;
  signal_group(SIGKILL);
  wait_for(pid_);
}

std::optional<ExitStatus> Process::status() const {
  siginfo_t info{};
  while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0)
    if (errno != EINTR) throw system_error("ask for the state of", concat("process ", pid_));
  if (info.si_pid == 0) return {};
  if (info.si_code == CLD_EXITED) return ExitStatus{.exit_code = info.si_status};
  return ExitStatus{.signal = info.si_status};
}

// ---- The guardian

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
  wait_for(pid_);
  ::munmap(groups_.data(), groups_.size_bytes());
}

}  // namespace lockstep
