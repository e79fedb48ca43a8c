// SPDX-License-Identifier: Apache-2.0
#include "cli/compare/training.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>

#include <fstream>

#include "bench/processes.h"
#include "cli/compare/metrics.h"
#include "lockstep/base/port.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/launch/interfaces.h"

namespace lockstep::compare {
namespace {

constexpr int kStopped = 128 + SIGTERM;  // lockstep train: stopped as asked
constexpr std::chrono::milliseconds kTick{50};
constexpr double kSecondsBetweenSamples = 0.5;  // of memory

sigset_t stop_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGINT);
  ::sigaddset(&signals, SIGTERM);
  return signals;
}

// With all that it has started.
double memory_of(int pid) {
  double bytes = bench::pss_bytes(pid);
  std::ifstream children(concat("/proc/", pid, "/task/", pid, "/children"));
  for (int child = 0; children >> child;) bytes += memory_of(child);
  return bytes;
}

std::vector<bench::LinkBytes> bytes_of(const bench::Network& network) {
  std::vector<bench::LinkBytes> links;
  for (int host = 0; host < network.hosts(); ++host) links.push_back(network.bytes(host));
  return links;
}

bench::LinkBytes busiest(const std::vector<bench::LinkBytes>& before, const std::vector<bench::LinkBytes>& after,
                         double steps) {
  bench::LinkBytes most;
  for (std::size_t host = 0; host < after.size(); ++host) {
    most.sent = std::max(most.sent, (after[host].sent - before[host].sent) / steps);
    most.received = std::max(most.received, (after[host].received - before[host].received) / steps);
  }
  return most;
}

// The first error that lockstep train has written, such as ": UsageError: ..."; "" if there is none.
std::string error_in(const std::filesystem::path& output) {
  constexpr std::string_view kBefore = "lockstep: ";  // a word in lower case, such as "warning", is that of a log
  std::ifstream file(output);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(kBefore) && line.size() > kBefore.size() && std::isupper(line[kBefore.size()]) != 0)
      return ": " + line.substr(kBefore.size());
  return "";
}

// The processes of one run, and what is seen of them from outside.
class Training {
 public:
  Training(const Run& run, const Settings& settings, const Place& place)
      : run_(run), settings_(settings), place_(place), deadline_(Deadline::after(deadline_of(place))) {
    const std::string output = place.folder / "output.txt";
    output_.reset(::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!output_) throw system_error("write", output);
    const int hosts = run.devices + run.contender.servers;
    if (settings.links == Links::kShaped) network_.emplace(hosts, settings.link);
    if (settings.links == Links::kLoopback) port_.emplace();
    for (int host = 0; host < (settings.links == Links::kNone ? 1 : hosts); ++host) start(host, hosts);
  }

  Outcome watch(const StopSignals& signals) {
    while (!processes_.empty() && outcome_.why.empty() && outcome_.stopped_by == 0) {
      wait(signals);
      look();
    }
    processes_.clear();  // kills what is left
    outcome_.seconds = since_start_.seconds();
    if (network_ && !links_.empty() && outcome_.why.empty())
      if (const int steps = read_metrics(metrics()).steps() - steps_at_links_; steps > 0)
        outcome_.link_bytes = busiest(links_, bytes_of(*network_), steps);
    return outcome_;
  }

 private:
  static std::chrono::milliseconds deadline_of(const Place& place) {
    return std::chrono::milliseconds(static_cast<std::int64_t>(place.deadline_seconds * 1e3));
  }

  std::filesystem::path metrics() const { return place_.folder / "metrics.jsonl"; }

  void start(int host, int hosts) {
    bench::Variables variables;
    Words command;
    if (network_) {
      command = {"nsenter", concat("--net=", network_->host(host).path())};
      variables = network_->variables(host, 0, 1);
    } else if (port_) {
      variables = bench::launcher_variables(
          {.host = host, .hosts = hosts, .address = address_for_others(), .port = port_->number()});
    }
    command.push_back(bench::beside_this("lockstep-train"));
    command.insert(command.end(), run_.arguments.begin(), run_.arguments.end());
    command.insert(command.end(), {"--metrics", metrics()});
    if (settings_.trace) command.insert(command.end(), {"--trace", place_.folder / "trace.json"});
    processes_.emplace_back(ProcessOptions{
        .command = command, .variables = variables, .output_fd = output_.get(), .error_fd = output_.get()});
  }

  // Until a process has ended, a signal has come, or a tick has passed.
  void wait(const StopSignals& signals) {
    std::vector<pollfd> ends{{.fd = signals.fd(), .events = POLLIN, .revents = 0}};
    for (const Process& process : processes_) ends.push_back({.fd = process.pidfd(), .events = POLLIN, .revents = 0});
    ::poll(ends.data(), ends.size(), static_cast<int>(kTick.count()));
    if ((ends.front().revents & POLLIN) != 0) outcome_.stopped_by = signals.received();
  }

  void look() {
    std::erase_if(processes_, [this](const Process& process) { return has_ended(process); });
    if (processes_.empty()) return;
    if (deadline_.passed() && outcome_.why.empty())
      outcome_.why = concat("it did not end within ", fixed(place_.deadline_seconds, 0), " s (--deadline)");
    sample_memory();
    if (!since_first_step_) look_for_first_step();
    if (since_first_step_ && !asked_ && settings_.budget.seconds > 0 &&
        since_first_step_->seconds() >= settings_.budget.seconds)
      ask_to_stop();
  }

  bool has_ended(const Process& process) {
    const std::optional<ExitStatus> status = process.status();
    if (!status) return false;
    const bool good = status->signal == 0 && (status->exit_code == 0 || (asked_ && status->exit_code == kStopped));
    if (!good && outcome_.why.empty()) {
      outcome_.exit_code = status->signal != 0 ? 128 + status->signal : status->exit_code;
      outcome_.why = status->signal != 0 ? concat("killed by signal ", status->signal)
                                         : concat("it ended with exit code ", status->exit_code,
                                                  error_in(place_.folder / "output.txt"));
    }
    return true;
  }

  void sample_memory() {
    if (since_sample_ && since_sample_->seconds() < kSecondsBetweenSamples) return;
    double bytes = 0;
    for (const Process& process : processes_) bytes += memory_of(process.pid());
    outcome_.peak_memory_bytes = std::max(outcome_.peak_memory_bytes, bytes);
    since_sample_.emplace();
  }

  void look_for_first_step() {
    if (settings_.budget.seconds == 0 && !network_) return;
    steps_at_links_ = read_metrics(metrics()).steps();
    if (steps_at_links_ == 0) return;
    if (network_) links_ = bytes_of(*network_);
    since_first_step_.emplace();
  }

  void ask_to_stop() {
    asked_ = true;
    for (const Process& process : processes_) ::kill(process.pid(), SIGTERM);  // a launcher passes it on to its ranks
  }

  const Run& run_;
  const Settings& settings_;
  const Place& place_;
  UniqueFd output_;
  std::optional<bench::Network> network_;
  std::optional<ReservedPort> port_;
  std::list<Process> processes_;
  std::vector<bench::LinkBytes> links_;  // after the first step
  int steps_at_links_ = 0;
  Stopwatch since_start_;
  std::optional<Stopwatch> since_first_step_;
  std::optional<Stopwatch> since_sample_;
  Deadline deadline_;
  bool asked_ = false;
  Outcome outcome_;
};

}  // namespace

StopSignals::StopSignals() {
  const sigset_t signals = stop_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  fd_.reset(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw system_error("make", "a descriptor for signals");
}

int StopSignals::received() const {
  signalfd_siginfo signal{};
  return ::read(fd_.get(), &signal, sizeof signal) == sizeof signal ? static_cast<int>(signal.ssi_signo) : 0;
}

Outcome train(const Run& run, const Settings& settings, const Place& place, const StopSignals& signals) {
  return Training(run, settings, place).watch(signals);
}

bool can_shape_links(const bench::LinkOptions& link, std::string& why) {
  try {
    const bench::Network probe(2, link);
    return true;
  } catch (const SystemError& error) {
    why = error.text().what;
    return false;
  }
}

}  // namespace lockstep::compare
