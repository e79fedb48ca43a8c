// SPDX-License-Identifier: Apache-2.0
#include "agent/start/spare.h"

#include <fcntl.h>

#include <filesystem>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Imports in a thread of low priority, which takes nothing from the ranks that train; the main thread stays at the usual one,
// because a process can't raise its priority again.
constexpr const char* kImportAndWait = R"(import os, threading
def load():
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    import lockstep.spare
thread = threading.Thread(target=load)
thread.start()
thread.join()
import lockstep.spare
lockstep.spare.wait_and_run())";

constexpr const char* kCoresVariable = "LOCKSTEP_SPARE_CORES";
constexpr const char* kChannelVariable = "LOCKSTEP_SPARE_CHANNEL";

// A message of one piece: NAME=VALUE, each with a zero byte at its end.
std::string message_for(const ProcessOptions& rank) {
  std::string text;
  for (const auto& [name, value] : rank.variables) text += concat(name, '=', value) + '\0';
  if (!rank.cores.empty()) text += concat(kCoresVariable, '=', join(rank.cores, ",")) + '\0';
  return text;
}

}  // namespace

std::vector<std::string> spare_command(const std::vector<std::string>& program) {
  if (program.empty() || !std::filesystem::path(program.front()).filename().string().starts_with("python")) return {};
  auto first = program.begin() + 1;  // that is no option of Python's
  for (; first != program.end() && first->starts_with('-') && *first != "-m"; ++first) {
    if (*first == "-" || first->starts_with("-c")) return {};  // a text, which is too short to be worth it
    const bool has_argument = *first == "-W" || *first == "-X";
    if (has_argument && first + 1 != program.end()) ++first;
  }
  if (first == program.end()) return {};
  std::vector<std::string> command(program.begin(), first);
  command.insert(command.end(), {"-c", kImportAndWait});
  command.insert(command.end(), first, program.end());
  return command;
}

Spare::Spare(ProcessOptions what, std::atomic<pid_t>* group) : what_(std::move(what)) {
  what_.command = spare_command(what_.command);
  what_.group = group;
}

// Until it is a rank it writes nothing.
void Spare::start() {
  if (what_.command.empty() || (process_ && !process_->status())) return;
  if (process_) {
    log_info(concat("no spare process for a lost rank: `", what_.command.front(),
                    " -c 'import lockstep'` fails, or runs out of memory"));
    return what_.command.clear();
  }
  auto [ours, theirs] = connected_pair(SOCK_SEQPACKET);
  ::fcntl(theirs.get(), F_SETFD, 0);  // the spare keeps it
  const UniqueFd nothing(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  ProcessOptions what = what_;
  what.output_fd = what.error_fd = nothing.get();
  what.variables.emplace_back(kChannelVariable, concat(theirs.get()));
  process_.emplace(what);
  channel_ = std::move(ours);
}

std::optional<Process> Spare::take(const ProcessOptions& rank) {
  std::optional<Process> process = std::move(process_);
  process_.reset();
  const std::vector<int> outputs{rank.output_fd >= 0 ? rank.output_fd : STDOUT_FILENO,
                                 rank.error_fd >= 0 ? rank.error_fd : STDERR_FILENO};
  const std::string message = message_for(rank);
  if (!process || process->status() ||
      !send_with_descriptors(channel_.get(), std::as_bytes(std::span(message)), outputs, Deadline::after({})))
    return {};
  rank.group->store(process->pid());
  what_.group->store(0);
  return process;
}

}  // namespace lockstep
