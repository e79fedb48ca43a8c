// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/reports/event_command.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <thread>

#include "agent/start/process.h"
#include "lockstep/base/log.h"
#include "lockstep/base/pipe.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"

namespace lockstep {
namespace {

constexpr const char* kEventCommand = "the command of --on-event";
constexpr milliseconds kToEnd = std::chrono::seconds(5);
constexpr milliseconds kToRead{100};
constexpr milliseconds kLookEvery{5};

// Returns an errno. SIGPIPE is as usual, though this process may ignore it.
int start_shell(const std::string& command, int input, pid_t& pid) {
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_adddup2(&files, input, STDIN_FILENO);
  ::posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGPIPE);
  posix_spawnattr_t how;
  ::posix_spawnattr_init(&how);
  ::posix_spawnattr_setsigdefault(&how, &signals);
  ::posix_spawnattr_setflags(&how, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
  const std::array<const char*, 4> words = {"sh", "-c", command.c_str(), nullptr};
  const int error = ::posix_spawnp(&pid, "sh", &files, &how, const_cast<char**>(words.data()), ::environ);
  ::posix_spawnattr_destroy(&how);
  ::posix_spawn_file_actions_destroy(&files);
  return error;
}

}  // namespace

EventCommand::EventCommand(const std::string& command) {
  Pipe pipe = make_pipe();
  if (const int error = start_shell(command, pipe.out.get(), pid_); error != 0)
    log_warning(concat(kEventCommand, " does not start: ", std::strerror(error)));
  else
    writer_ =
        std::make_unique<BackgroundWriter>(std::move(pipe.in), kEventCommand, BackgroundWriterOptions{.at_once = true});
}

EventCommand::~EventCommand() {
  if (writer_) writer_->finish(kToRead);
}

void EventCommand::finish() {
  if (!writer_) return;
  const Deadline deadline = Deadline::after(kToEnd);
  writer_->finish(kToEnd);
  writer_.reset();
  int status = 0;
  pid_t ended = 0;
  while ((ended = ::waitpid(pid_, &status, WNOHANG)) == 0 && !deadline.passed())
    std::this_thread::sleep_for(kLookEvery);
  if (ended == 0)
    log_warning(concat(kEventCommand, ", pid ", pid_, ", still runs ", human_seconds(kToEnd),
                       " after the last event, and is left alone"));
  else if (ended > 0 && status != 0)
    log_warning(concat(kEventCommand, ' ',
                       how_it_ended(WIFEXITED(status) ? ExitStatus{.exit_code = WEXITSTATUS(status)}
                                                      : ExitStatus{.signal = WTERMSIG(status)})));
}

}  // namespace lockstep
