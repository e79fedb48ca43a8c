// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/reports/metrics.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "agent/start/process.h"
#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/pipe.h"
#include "lockstep/base/process/host_name.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/train/builtin.h"

namespace lockstep {
namespace {

constexpr const char* kEventCommand = "the command of --on-event";
constexpr milliseconds kToEnd = std::chrono::seconds(5);
constexpr milliseconds kToRead{100};
constexpr milliseconds kLookEvery{5};

constexpr std::chrono::milliseconds kHandOver{100};
constexpr std::chrono::milliseconds kUsual{1};  // what a disk takes that is not slow

bool ends_within_a_line(const std::string& path) {
  if (!std::filesystem::is_regular_file(path)) return false;
  std::ifstream in(path, std::ios::binary);
  in.seekg(-1, std::ios::end);  // fails in an empty file
  return in && in.get() != '\n';
}

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

Json machine() {
  return {{"host", host_name()},
          {"cpu", proc_value("/proc/cpuinfo", "model name")},
          {"cores", std::thread::hardware_concurrency()},
          {"memory_bytes", static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE)}};
}

}  // namespace

class EventCommand {
 public:
  explicit EventCommand(const std::string& command);
  ~EventCommand();  // closes its stdin. Blocks 0.1 s at most
  EventCommand& operator=(EventCommand&&) = delete;

  void offer(const std::string& line) {
    if (writer_) writer_->offer(line);
  }
  void finish();

 private:
  std::unique_ptr<BackgroundWriter> writer_;  // null: it does not run
  int pid_ = -1;
};

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

MetricsFile::MetricsFile(const std::string& path, bool append) : path_(path) {
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : O_TRUNC), 0666));
  if (!file) throw system_error("write the metrics to", path);
  writer_ = std::make_unique<BackgroundWriter>(std::move(file), path, BackgroundWriterOptions{.at_once = true});
  if (append && ends_within_a_line(path)) writer_->offer("\n");
}

void MetricsFile::pass_on_to(const std::string& command) { command_ = std::make_shared<EventCommand>(command); }

void MetricsFile::write(const Json& event) {
  if (!writer_ && !command_) return;
  const std::string line = event.dump() + '\n';
  if (command_) command_->offer(line);
  if (writer_) writer_->offer(line);
}

void MetricsFile::hand_over() {
  if (!writer_ || waited_ >= kHandOver) return;
  const auto began = std::chrono::steady_clock::now();
  writer_->wait_until_written(kHandOver);
  const auto took = std::chrono::steady_clock::now() - began;
  if (took > kUsual) waited_ += took;
}

bool MetricsFile::finish() {
  const bool is_whole = !writer_ || writer_->finish() == 0;
  if (command_) command_->finish();
  return is_whole;
}

void MetricsFile::require_written() {
  if (!finish())
    throw SystemError({.what = concat("the metrics in ", path_, " lack events, which could not be written"),
                       .here = path_,
                       .likely = "a full disk, or one that does not answer",
                       .next = "make room before the next run; the training itself is complete"});
}

std::string command_of(int argc, const char* const* argv) {
  std::string program = argv[0];
  program.erase(program.find_last_not_of(' ') + 1);  // room for the rank (base/process/process_title.h)
  std::vector<std::string> words = split(program, ' ');
  words.insert(words.end(), argv + 1, argv + argc);
  for (std::string& word : words) word = for_shell(word);
  return join(words, " ");
}

Json start_event(const TrainOptions& options, int64_t step) {
  Json event = {{"event", "start"},
                {"format", kMetricsFormat},
                {"step", step},  // that comes next: what an earlier attempt wrote of it and of later ones is void
                {"command", options.command},
                {"launcher", options.launcher},
                {"machine", machine()},
                {"settings", all_settings(options)}};
  if (!options.fit.empty())
    if (const auto classes = fit_of(options.fit).data.classes; !classes.empty()) event["classes"] = classes;
  return event;
}

Json facts_of_each_rank(const World& together, const World& world, const PhaseTimes& phases, double data_seconds) {
  const auto bytes = [](const char* file, const char* name) { return static_cast<int64_t>(proc_bytes(file, name)); };
  const Json mine = {{"rank", world.rank()},
                     {"node", world.node_rank()},
                     {"forward_seconds", phases.forward},
                     {"backward_seconds", phases.backward},
                     {"exchange_seconds", phases.exchange},
                     {"update_seconds", phases.update},
                     {"data_seconds", data_seconds},
                     {"pss_bytes", bytes("/proc/self/smaps_rollup", "Pss:")},
                     {"peak_rss_bytes", bytes("/proc/self/status", "VmHWM:")}};
  Json ranks = Json::array();
  for (const std::string& text : together.exchange_texts(mine.dump())) ranks.push_back(Json::parse(text));
  return ranks;
}

}  // namespace lockstep
