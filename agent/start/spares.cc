// SPDX-License-Identifier: Apache-2.0
#include "agent/start/spares.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
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

bool is_python(const std::string& program) {
  return std::filesystem::path(program).filename().string().starts_with("python");
}

// Tells which of Python's own options have an argument of their own.
bool has_argument(const std::string& option) { return option == "-W" || option == "-X"; }

// A message of one piece: NAME=VALUE, each with a zero byte at its end.
std::string message_for(const ProcessOptions& rank) {
  std::string text;
  for (const auto& [name, value] : rank.variables) text += concat(name, '=', value) + '\0';
  std::vector<int> cores(rank.cores.begin(), rank.cores.end());
  if (!cores.empty()) text += concat(kCoresVariable, '=', join(cores, ",")) + '\0';
  return text;
}

}  // namespace

std::vector<std::string> spare_command(const std::vector<std::string>& program) {
  if (program.size() < 2 || !is_python(program.front())) return {};
  std::size_t first = 1;  // that is no option of Python's
  while (first < program.size() && program[first].starts_with('-') && program[first] != "-m") {
    if (program[first].size() > 1 && program[first][1] == 'c') return {};  // a text, which is too short to be worth it
    if (program[first] == "-") return {};
    first += has_argument(program[first]) ? 2 : 1;
  }
  if (first >= program.size()) return {};
  std::vector<std::string> command(program.begin(), program.begin() + static_cast<std::ptrdiff_t>(first));
  command.insert(command.end(), {"-c", kImportAndWait});
  command.insert(command.end(), program.begin() + static_cast<std::ptrdiff_t>(first), program.end());
  return command;
}

Spares::Spares(const std::vector<std::string>& program, std::vector<std::atomic<pid_t>*> groups)
    : command_(spare_command(program)), groups_(std::move(groups)) {}

void Spares::start(ProcessOptions what) {
  if (command_.empty() || tried_in_vain_) return;
  if (std::ranges::any_of(waiting_, [](const Spare& spare) { return spare.process.status().has_value(); })) {
    tried_in_vain_ = true;
    return log_info(concat("no spare process for a lost rank: `", command_.front(),
                           " -c 'import lockstep'` fails, or runs out of memory"));
  }
  for (std::atomic<pid_t>* group : groups_) {
    if (is_used(group)) continue;
    what.group = group;
    start_one(what);
  }
}

bool Spares::is_used(std::atomic<pid_t>* group) const {
  return std::ranges::any_of(waiting_, [group](const Spare& spare) { return spare.group == group; });
}

// Until it is a rank it writes nothing.
void Spares::start_one(ProcessOptions what) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()) != 0) throw system_error("make", "a pair of sockets");
  UniqueFd mine(ends[0]);
  const UniqueFd theirs(ends[1]);
  ::fcntl(mine.get(), F_SETFD, FD_CLOEXEC);
  const UniqueFd nothing(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  what.output_fd = what.error_fd = nothing.get();
  what.command = command_;
  what.variables.emplace_back(kChannelVariable, concat(theirs.get()));
  waiting_.push_back({Process(what), std::move(mine), what.group});
}

std::optional<Process> Spares::take(const ProcessOptions& rank) {
  while (!waiting_.empty()) {
    Spare spare = std::move(waiting_.front());
    waiting_.pop_front();
    const std::vector<int> outputs{rank.output_fd >= 0 ? rank.output_fd : STDOUT_FILENO,
                                   rank.error_fd >= 0 ? rank.error_fd : STDERR_FILENO};
    const std::string message = message_for(rank);
    if (spare.process.status() ||
        !send_with_descriptors(spare.channel.get(), std::as_bytes(std::span(message)), outputs, Deadline::after({})))
      continue;
    if (rank.group != nullptr) rank.group->store(spare.process.pid());
    spare.group->store(0);
    return std::optional<Process>(std::move(spare.process));
  }
  return {};
}

std::vector<int> Spares::descriptors() const {
  std::vector<int> fds;
  for (const Spare& spare : waiting_) fds.insert(fds.end(), {spare.channel.get(), spare.process.pidfd()});
  return fds;
}

}  // namespace lockstep
