// SPDX-License-Identifier: Apache-2.0
#include "agent/watch/stacks.h"

#include <cxxabi.h>
#include <fcntl.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "agent/start/process.h"
#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/pipe.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr size_t kLongestFrame = 300;      // names of templates are longer
constexpr const char* kMostFrames = "40";  // of a thread
constexpr auto kPerTool = std::chrono::seconds(45);

// ---- Tools

using Command = std::vector<std::string>;

std::vector<Command> tools_for(pid_t pid) {
  const std::string process = concat(pid);
  std::error_code error;
  const std::string program = std::filesystem::read_symlink(concat("/proc/", pid, "/exe"), error).filename();
  std::vector<Command> tools;
  if (program.starts_with("python")) tools.push_back({"py-spy", "dump", "--pid", process});
  // The faster one first: of a process with libtorch eu-stack takes 1 s, gdb 6 s, and 15 s where it demangles all names.
  tools.push_back({"eu-stack", "-n", kMostFrames, "-p", process});
  tools.push_back({"gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off", "-iex", "set demangle-style none",
                   "-p", process, "-ex", concat("thread apply all -ascending bt ", kMostFrames)});
  return tools;
}

// Shows frames and their threads; py-spy writes nothing else.
bool is_shown(const std::string& tool, std::string_view line) {
  if (tool == "py-spy") return !line.empty();
  return line.starts_with('#') || line.starts_with("Thread ") || line.starts_with("TID ");
}

bool is_in_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.' || c == '$'; }

// "#1  0x1 in _ZN8lockstep3runE ()" -> "#1  0x1 in lockstep::run ()"
std::string demangled(const std::string& line) {
  const size_t begin = line.find("_Z");
  if (begin == std::string::npos || (begin > 0 && is_in_name(line[begin - 1]))) return line;
  const auto end = std::find_if_not(line.begin() + static_cast<ptrdiff_t>(begin), line.end(), is_in_name);
  const std::string name(line.begin() + static_cast<ptrdiff_t>(begin), end);
  const std::unique_ptr<char, decltype(&std::free)> plain(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr),
                                                          &std::free);
  return plain ? concat(line.substr(0, begin), plain.get(), std::string(end, line.end())) : line;
}

// Empty: it is not installed, or must not look.
std::string lines_of(const Command& tool, Deadline deadline) try {
  auto [from_tool, to_us] = make_pipe();
  const UniqueFd nothing(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  const Process process({.command = tool,
                         .variables = {{"DEBUGINFOD_URLS", ""}},  // nothing is fetched
                         .output_fd = to_us.get(),
                         .error_fd = nothing.get()});
  to_us.reset();
  std::string shown;
  for (const std::string& line : split(read_to_end_of(from_tool.get(), deadline).text, '\n'))
    if (is_shown(tool.front(), line)) shown += demangled(line).substr(0, kLongestFrame) + '\n';
  return shown;
} catch (const Error&) {
  return "";
}

// ---- Without tools

// The kernel's function also tells the system call: futex_wait_queue, do_poll, pipe_read.
std::string describe_task(const std::filesystem::path& task) {
  std::string kernel;
  std::ifstream(task / "wchan") >> kernel;
  return concat("thread ", task.filename().string(), " (", proc_value(task / "status", "Name:"),
                "): ", proc_value(task / "status", "State:"), kernel.size() > 1 ? ", in the kernel in " + kernel : "",
                '\n');
}

std::string tasks_of(pid_t pid) {
  std::string text;
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator(concat("/proc/", pid, "/task"), error))
    text += describe_task(task.path());
  return text.empty() ? "no stack: the process has ended, or is another user's\n" : text;
}

}  // namespace

std::string stacks_of(pid_t pid, Deadline deadline) {
  std::string text;
  bool has_native = false;
  for (const Command& tool : tools_for(pid)) {
    if (has_native || deadline.passed()) break;
    const auto left = std::min<milliseconds>(kPerTool, deadline.left());
    const std::string shown = lines_of(tool, Deadline::after(left));
    if (!shown.empty()) text += concat("by ", tool.front(), ":\n", shown);
    has_native = !shown.empty() && tool.front() != "py-spy";
  }
  if (!has_native)
    text +=
        concat("by /proc (for the functions of the program install gdb or elfutils on this machine):\n", tasks_of(pid));
  return text;
}

}  // namespace lockstep
