// SPDX-License-Identifier: Apache-2.0
#include "bench/processes.h"

#include <poll.h>

#include <cstdlib>
#include <system_error>

#include "lockstep/base/files/file.h"
#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

bool has_succeeded(const Process& process, const std::string& name) {
  const std::optional<ExitStatus> status = process.status();
  if (!status) return false;
  if (status->exit_code == 0 && status->signal == 0) return true;
  throw SystemError({.what = concat(name, " failed"), .likely = "its own message is above"});
}

}  // namespace

TemporaryFolder::TemporaryFolder(const std::filesystem::path& in) {
  std::string path = (in / "lockstep-bench-XXXXXX").string();
  if (::mkdtemp(path.data()) == nullptr) throw system_error("make a folder like", path);
  path_ = path;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string beside_this(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
}

// Each round polls the processes that are left, until one of them ends or the time is up. The first that fails ends the
// wait; whoever owns the list then ends the others.
void wait_for_success(std::list<Process>& processes, const std::string& name, std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  while (!processes.empty()) {
    std::vector<pollfd> ends;
    for (const Process& process : processes) ends.push_back({.fd = process.pidfd(), .events = POLLIN, .revents = 0});
    if (::poll(ends.data(), ends.size(), static_cast<int>(deadline.left().count())) == 0)
      throw SystemError({.what = concat(name, " did not end in time")});
    std::erase_if(processes, [&](const Process& process) { return has_succeeded(process, name); });
  }
}

double pss_bytes(int pid) { return proc_bytes(concat("/proc/", pid, "/smaps_rollup"), "Pss:"); }

std::string run_python(const std::string& script, const std::vector<std::string>& arguments) {
  const TemporaryFolder folder;
  const std::string output = folder.file("output");
  const std::string command = concat("OMP_NUM_THREADS=1 timeout 600 python3 '", beside_this(script), "' '",
                                     join(arguments, "' '"), "' > '", output, "'");
  if (std::system(command.c_str()) != 0)
    throw SystemError({.what = concat("python3 ", script, " failed"), .likely = "its own message is above"});
  return read_file(output);
}

std::string why_no_python(const std::string& modules) {
  const int code = std::system(concat("python3 -c 'import ", modules, "' 2> /dev/null").c_str());
  return code == 0 ? "" : concat("python3 can't import ", modules, " (tools/setup.sh pytorch, and PYTHONPATH)");
}

}  // namespace lockstep::bench
