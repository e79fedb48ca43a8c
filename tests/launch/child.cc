// SPDX-License-Identifier: Apache-2.0
#include "tests/launch/child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "lockstep/base/files/file.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep::testing {
namespace {

UniqueFd create(const std::string& path) {
  return UniqueFd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
}

[[noreturn]] void become(const std::vector<std::string>& command, int output, int error) {
  ::signal(SIGINT, SIG_DFL);  // a test run in the background ignores it
  ::dup2(output, STDOUT_FILENO);
  ::dup2(error, STDERR_FILENO);
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments.front(), arguments.data());
  ::_exit(127);
}

}  // namespace

bool wait_until(const std::function<bool()>& condition, std::chrono::milliseconds patience) {
  for (const Deadline deadline = Deadline::after(patience); !deadline.passed();) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return condition();
}

bool is_running(int pid) {
  try {
    const std::string stat = read_file(concat("/proc/", pid, "/stat"));
    const char state = stat.at(stat.rfind(')') + 2);
    return state != 'Z' && state != 'X';
  } catch (const SystemError&) {
    return false;
  }
}

int pid_in(const TempFolder& folder, const std::string& name) {
  return wait_until([&] { return folder.has(name); }) ? std::stoi(read_file(folder / name)) : 0;
}

Child::Child(const std::vector<std::string>& command) {
  const UniqueFd output = create(folder_.file("out"));
  const UniqueFd error = create(folder_.file("err"));
  pid_ = ::fork();
  if (pid_ == 0) become(command, output.get(), error.get());
}

Child::~Child() {
  if (has_ended()) return;
  signal(SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Child::signal(int number) const { ::kill(pid_, number); }

int Child::wait(std::chrono::milliseconds patience) {
  return wait_until([this] { return has_ended(); }, patience) ? exit_code_ : -1;
}

bool Child::has_ended() {
  int status = 0;
  if (ended_ || ::waitpid(pid_, &status, WNOHANG) != pid_) return ended_;
  exit_code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return ended_ = true;
}

std::string Child::output() const { return read_file(folder_.file("out")); }
std::string Child::error() const { return read_file(folder_.file("err")); }

Ended run(const std::vector<std::string>& command, std::chrono::milliseconds patience) {
  Child child(command);
  const int exit_code = child.wait(patience);
  return {exit_code, child.output(), child.error()};
}

}  // namespace lockstep::testing
