#include "bench/python_peer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "bench/child.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

constexpr std::chrono::minutes kLongestRun{10};

void run_to_its_end(const std::vector<std::string>& command, int output) {
  ProcessOptions options{.command = command, .body = nullptr};
  options.variables = {{"OMP_NUM_THREADS", "1"}};
  options.output_fd = output;
  ::sigemptyset(&options.signal_mask);
  require_good_end(Process(options), concat(command.front(), " ", command[1]), kLongestRun);
}

}  // namespace

std::string run_python(const std::string& script, const std::vector<std::string>& arguments) {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  std::vector<std::string> command = {"python3", (folder / script).string()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  const UniqueFd output(::memfd_create("output", MFD_CLOEXEC));
  if (!output) throw system_error("make", "a file for a program's output");
  run_to_its_end(command, output.get());
  return read_file(concat("/proc/self/fd/", output.get()));
}

std::string why_no_python(const std::string& modules) {
  const int code = std::system(concat("python3 -c 'import ", modules, "' 2> /dev/null").c_str());
  return code == 0 ? "" : concat("python3 can't import ", modules, " (tools/setup.sh pytorch, and PYTHONPATH)");
}

}  // namespace lockstep::bench
