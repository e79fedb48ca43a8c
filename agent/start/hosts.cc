// SPDX-License-Identifier: Apache-2.0
#include "agent/start/hosts.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <regex>

#include "agent/meet/job_secret.h"
#include "agent/start/output.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Words = std::vector<std::string>;

constexpr milliseconds kHostAnswersWithin{20'000};
constexpr milliseconds kHostEndsWithin{10'000};  // after the grace period
constexpr milliseconds kVariablesComeWithin{60'000};

UsageError bad_host(const std::string& what, const std::string& here) {
  return UsageError({.what = what, .here = here, .next = "give NAME:SLOTS,… or a file with lines NAME slots=N"});
}

// One ssh.
struct Remote {
  Host host;
  RankStream output;
  RankStream error;
  UniqueFd input{};  // leads to its stdin
  std::optional<Process> process{};
  std::optional<ExitStatus> end{};
};

std::string quoted(const Words& words) {
  std::string text;
  for (const std::string& word : words) text += concat(' ', for_shell(word));
  return text;
}

Words over_ssh(const std::string& host, const Words& command) {
  const char* const told = std::getenv("LOCKSTEP_SSH");
  Words words = split(told == nullptr ? "ssh" : told, ' ');
  for (const char* option : {"BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10"})
    words.insert(words.end(), {"-o", option});
  const std::string folder = std::filesystem::current_path();
  words.insert(words.end(), {host, concat("cd", quoted({folder}), " && exec", quoted(command))});
  return words;
}

void start_ssh(Remote& remote, const Words& command, ProcessOptions what = {}) {
  const UniqueFd output = remote.output.open();
  const UniqueFd error = remote.error.open();
  what.command = over_ssh(remote.host.name, command);
  what.output_fd = output.get();
  what.error_fd = error.get();
  remote.process.emplace(what);
}

// Waits for output and ends, which go to `ended`.
void wait_for_ssh(std::vector<Remote>& remotes, std::vector<Remote*>& ended, std::vector<Event> events,
                  std::optional<Deadline> deadline) {
  for (Remote& remote : remotes) {
    remote.output.add_events(events);
    remote.error.add_events(events);
    const auto see_end = [&remote, &ended] {
      remote.end = remote.process->status();
      if (!remote.end) return;
      remote.output.drain();
      remote.error.drain();
      ended.push_back(&remote);
    };
    if (!remote.end) events.push_back({remote.process->pidfd(), POLLIN, see_end});
  }
  poll_events(events, deadline ? static_cast<int>(deadline->left().count()) : -1);
}

// "": there is the right version.
std::string trouble_of(const Remote& remote, const std::string& version) {
  if (!remote.end) return concat("no answer within ", human_seconds(kHostAnswersWithin));
  const bool failed = remote.end->failed();
  const auto& lines = (failed ? remote.error : remote.output).last_lines();
  const std::string last = lines.empty() ? how_it_ended(*remote.end) : lines.back();
  return !failed && last == version ? "" : last;
}

void require_hosts(const SshOptions& options) {
  Sinks unused;
  std::vector<Remote> remotes;
  for (const Host& host : options.hosts) remotes.push_back({host, {"", unused.out}, {"", unused.err}});
  const Words ask = {options.command.front(), "--version"};
  for (Remote& remote : remotes) start_ssh(remote, ask);
  std::vector<Remote*> ended;
  const auto deadline = Deadline::after(kHostAnswersWithin);
  while (ended.size() < remotes.size() && !deadline.passed()) wait_for_ssh(remotes, ended, {}, deadline);
  std::string troubles;
  for (const Remote& remote : remotes)
    if (const std::string trouble = trouble_of(remote, options.version); !trouble.empty())
      troubles += concat("\n    ", remote.host.name, ": ", trouble);
  if (!troubles.empty())
    throw EnvironmentError({.what = concat("hosts that can't run ", options.version, ":", troubles),
                            .likely = "no ssh key, or other files than here",
                            .next = concat("try ssh HOST ", join(ask, " "))});
}

std::string variables_for(const SshOptions& options) {
  std::string text = concat("LOCKSTEP_SECRET=", make_secret(), '\0');
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view each = *variable;
    if ((each.starts_with("LOCKSTEP_") && !each.starts_with("LOCKSTEP_SECRET")) || each.starts_with("OMP_") ||
        std::ranges::find(options.exports, each.substr(0, each.find('='))) != options.exports.end())
      text.append(each).push_back('\0');
  }
  return text + '\0';
}

// Tells whether it was ended from here, or says that it ends because it has lost another.
bool blames_others(const Remote& remote) {
  const std::string text = join(remote.error.last_lines(), "\n");
  const size_t begin = text.find("RankFailed");  // other ranks' lines are before that
  return remote.end->signal != 0 || remote.end->code() == kSignalBase + SIGTERM ||
         text.find("PeerLost", begin == std::string::npos ? 0 : begin) != std::string::npos;
}

class HostsJob {
 public:
  HostsJob(const SshOptions& options, Sinks& sinks) : options_(options), sinks_(sinks) {
    for (const Host& host : options.hosts) {
      const std::string prefix = concat("[", host.name, "] ");
      remotes_.push_back({host, {prefix, sinks.out, true}, {prefix, sinks.err, true}});
    }
    for (Remote& remote : remotes_) start(remote);
  }

  int run() {
    while (ended_.size() < remotes_.size()) wait_for_events();
    const Remote* const failed = first_failure();
    if (failed == nullptr) return 0;
    if (failed->end->code() == options_.stop_code) return failed->end->code();
    if (signal_ != 0) return kSignalBase + signal_;
    sinks_.err.add_line("lockstep: ", concat("host ", failed->host.name, " ", how_it_ended(*failed->end)));
    return failed->end->code();
  }

 private:
  void start(Remote& remote) {
    Words command = options_.command;
    command.insert(command.end(), {concat("--nproc-per-node=", remote.host.slots), "--"});
    command.insert(command.end(), options_.program.begin(), options_.program.end());
    auto [ours, theirs] = connected_pair();
    start_ssh(remote, command, {.input_fd = theirs.get(), .signal_mask = signals_.mask_before()});
    remote.input = std::move(ours);
    const auto sent = ::send(remote.input.get(), variables_.data(), variables_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != std::ssize(variables_)) throw system_error("send variables to", remote.host.name);
  }

  // While the job runs, its end, signals and output wake this process.
  void wait_for_events() {
    std::vector<Event> events = {{signals_.fd(), POLLIN, [this] { on_signal(signals_.next()); }}};
    sinks_.add_events(events);
    wait_for_ssh(remotes_, ended_, std::move(events), is_ending_ ? kill_at_ : end_at_);
    if (!is_ending_) end_after_failures();
    if (kill_at_ && kill_at_->passed()) kill();
  }

  // The one that others blame is ending by itself, and may be slower than they: ended from here it would lose its exit code.
  void end_after_failures() {
    for (const Remote* remote : ended_) {
      if (!has_failed(*remote)) continue;
      if (!blames_others(*remote)) return end();
      if (!end_at_) end_at_ = Deadline::after(kHostEndsWithin);
    }
    if (end_at_ && end_at_->passed()) end();
  }

  void on_signal(int signal) {
    if (signal == 0) return;
    is_ending_ ? kill() : end();
    signal_ = signal;
  }

  void end() {
    is_ending_ = true;
    for (Remote& remote : remotes_) remote.input.reset();
    kill_at_ = Deadline::after(options_.grace + kHostEndsWithin);
  }

  void kill() {
    for (const Remote& remote : remotes_) remote.process->signal_group(SIGKILL);
    kill_at_.reset();
  }

  bool has_failed(const Remote& remote) const {
    return remote.end->code() != 0 && remote.end->code() != options_.stop_code;
  }

  // One that is nobody else's, if there is one.
  const Remote* first_failure() const {
    const Remote* first = nullptr;
    for (const Remote* remote : ended_) {
      if (has_failed(*remote) && !blames_others(*remote)) return remote;
      if (first == nullptr && remote->end->code() != 0) first = remote;
    }
    return first;
  }

  const SshOptions& options_;
  const SignalReader signals_;
  const std::string variables_ = variables_for(options_);
  Sinks& sinks_;
  std::vector<Remote> remotes_;
  std::vector<Remote*> ended_;  // in this order
  int signal_ = 0;              // the last that came
  bool is_ending_ = false;
  std::optional<Deadline> end_at_{};
  std::optional<Deadline> kill_at_{};
};

// From now on the end of stdin is a SIGTERM, also while this process waits for other machines.
void end_with_stdin() {
  if (::fcntl(STDIN_FILENO, F_SETOWN, ::getpid()) != 0 || ::fcntl(STDIN_FILENO, F_SETSIG, SIGTERM) != 0 ||
      ::fcntl(STDIN_FILENO, F_SETFL, ::fcntl(STDIN_FILENO, F_GETFL) | O_ASYNC) != 0)
    throw system_error("watch", "stdin");
  pollfd ended = to_poll(STDIN_FILENO);  // before that
  if (poll_for({&ended, 1}, {}) != 0) ::raise(SIGTERM);
}

}  // namespace

std::vector<Host> read_hosts(const std::string& file_or_list) {
  const std::regex word(R"((\w[\w.@-]*)(?::([1-9]\d{0,4}))?)");
  const std::regex line(R"(\s*(?:(\w[\w.@-]*)(?:\s+slots=([1-9]\d{0,4}))?)?\s*(?:#.*)?\s*)");
  const bool is_file = std::filesystem::exists(file_or_list);
  const Words parts = is_file ? split(read_file(file_or_list), '\n') : split(file_or_list, ',');
  std::vector<Host> hosts;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string here = is_file ? concat(file_or_list, ", line ", i + 1) : concat("--hosts ", file_or_list);
    std::smatch match;
    if (!std::regex_match(parts[i], match, is_file ? line : word))
      throw bad_host(concat("'", parts[i], "' is not a host"), here);
    if (!match[1].matched) continue;
    if (std::ranges::find(hosts, match.str(1), &Host::name) != hosts.end())
      throw bad_host(concat("host ", match.str(1), " is there twice"), here);
    hosts.push_back({match.str(1), match.str(2)});
  }
  if (hosts.empty()) throw bad_host("no host", file_or_list);
  return hosts;
}

int run_on_hosts(const SshOptions& options) {
  require_hosts(options);
  Sinks sinks;
  const int code = HostsJob(options, sinks).run();
  sinks.flush();
  return code;
}

UniqueFd start_remotely() {
  const Deadline deadline = Deadline::after(kVariablesComeWithin);
  std::string text;
  for (char byte = 0; wait_for(POLLIN, STDIN_FILENO, deadline) && ::read(STDIN_FILENO, &byte, 1) == 1;) {
    if (byte == '\0' && text.empty()) {
      end_with_stdin();
      return tell_in_memory();
    }
    text.push_back(byte);
    if (byte != '\0') continue;
    const size_t equals = std::min(text.find('='), text.size() - 1);
    ::setenv(text.substr(0, equals).c_str(), text.data() + equals + 1, 1);
    text.clear();
  }
  throw EnvironmentError({.what = "the machine that starts the job sends no variables"});
}

}  // namespace lockstep
