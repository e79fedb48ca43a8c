// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/fault.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/error.h"

namespace lockstep::fault {
namespace {

constexpr const char* kVariable = "LOCKSTEP_FAULT";
constexpr std::array kPhaseNames = {"meeting", "loading",    "forward", "backward", "publish",
                                    "update",  "validation", "saving",  "between"};
constexpr int kAny = -1;

struct Fault {
  Phase phase = Phase::kBetween;
  int rank = kAny;
  int step = kAny;
  int generation = 0;
  bool at_end = false;
  int instructions = 0;  // of the calling thread, after the phase's beginning
  int microseconds = 0;  // after the phase's beginning
  int signal = SIGKILL;
  bool used = false;
};

const char* name_of(Phase phase) { return kPhaseNames.at(to_size(static_cast<int>(phase))); }

UsageError unreadable(const std::string& what, const std::string& text) {
  return UsageError({.what = concat(what, " in ", kVariable, "=\"", text, "\""),
                     .next = "write it as rank=1,step=7,phase=update,after=1000, see docs/recovery.md; or unset it"});
}

int number_in(const std::string& entry, const std::string& value, const std::string& text) {
  int number = 0;
  if (value == "any") return kAny;
  if (!parse_int(value, number) || number < 0) throw unreadable(concat("no number in \"", entry, "\""), text);
  return number;
}

Phase phase_named(const std::string& name, const std::string& text) {
  const auto found = std::ranges::find(kPhaseNames, name);
  if (found == kPhaseNames.end())
    throw unreadable(concat("there is no phase \"", name, "\" (they are ", join(kPhaseNames, ", "), ")"), text);
  return static_cast<Phase>(found - kPhaseNames.begin());
}

void set_entry(Fault& fault, const std::string& entry, const std::string& text) {
  const std::size_t equals = std::min(entry.find('='), entry.size());
  const std::string name = entry.substr(0, equals);
  const std::string value = entry.substr(std::min(equals + 1, entry.size()));
  const std::pair<const char*, int*> numbers[] = {
      {"rank", &fault.rank},          {"step", &fault.step},          {"generation", &fault.generation},
      {"after", &fault.instructions}, {"delay", &fault.microseconds}, {"signal", &fault.signal}};
  const auto number = std::ranges::find_if(numbers, [&](const auto& each) { return name == each.first; });
  if (name == "phase")
    fault.phase = phase_named(value, text);
  else if (name == "at" && (value == "start" || value == "end"))
    fault.at_end = value == "end";
  else if (number != std::end(numbers))
    *number->second = number_in(entry, value, text);
  else
    throw unreadable(concat("\"", entry, "\" has no meaning"), text);
}

std::vector<Fault> faults_in(const std::string& text) {
  std::vector<Fault> faults;
  for (const std::string& one : split(text, ';')) {
    Fault fault;
    for (const std::string& entry : split(one, ',')) set_entry(fault, entry, text);
    if (one.find("phase=") == std::string::npos) throw unreadable("no phase", text);
    if (fault.signal <= 0 || fault.signal > SIGRTMAX) throw unreadable(concat("no signal ", fault.signal), text);
    faults.push_back(fault);
  }
  return faults;
}

int number_of(const char* variable) {
  const char* const text = std::getenv(variable);
  int number = 0;
  return text != nullptr && parse_int(text, number) ? number : 0;
}

bool is_at(int wanted, std::int64_t here) { return wanted == kAny || wanted == here; }

void say(const Fault& fault, std::int64_t step) {
  const std::string line = concat("lockstep: ", kVariable, ": rank ", number_of("RANK"), ", step ", step, ", ",
                                  name_of(fault.phase), fault.at_end ? ", at its end" : "",
                                  fault.instructions > 0 ? concat(", after ", fault.instructions, " instructions") : "",
                                  fault.microseconds > 0 ? concat(", after ", fault.microseconds, " us") : "",
                                  ": signal ", fault.signal, "\n");
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

void send_own(int signal) { ::kill(::getpid(), signal); }

void send_own_later(int signal, int microseconds) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = signal;
  timer_t timer{};
  itimerspec when{};
  when.it_value = {.tv_sec = microseconds / 1'000'000, .tv_nsec = 1000L * (microseconds % 1'000'000)};
  if (::timer_create(CLOCK_MONOTONIC, &event, &timer) != 0 || ::timer_settime(timer, 0, &when, nullptr) != 0)
    throw system_error("start", "a timer");
}

// In a child of its own: lets `thread` of `process` make so many instructions, then sends the signal. It makes system
// calls only, because the other threads that its parent had are not there.
[[noreturn]] void step_through(pid_t process, pid_t thread, int instructions, int signal, int go, int ready) {
  char byte = 0;
  if (::read(go, &byte, 1) != 1 || ::ptrace(PTRACE_ATTACH, thread, nullptr, nullptr) != 0) ::_exit(1);
  int status = 0;
  ::waitpid(thread, &status, __WALL);
  if (::write(ready, "r", 1) != 1) ::_exit(1);
  for (int done = 0; done < instructions && WIFSTOPPED(status); ++done) {
    const int stopped_by = WSTOPSIG(status);
    const long passed_on = stopped_by == SIGTRAP || stopped_by == SIGSTOP ? 0 : stopped_by;
    if (::ptrace(PTRACE_SINGLESTEP, thread, nullptr, passed_on) != 0) break;
    if (::waitpid(thread, &status, __WALL) != thread) break;
  }
  if (signal != SIGKILL) ::ptrace(PTRACE_DETACH, thread, nullptr, nullptr);
  ::kill(process, signal);
  ::_exit(0);
}

// Returns in single steps.
void send_own_after_instructions(int signal, int instructions) {
  std::array<int, 2> go{}, ready{};
  if (::pipe(go.data()) != 0 || ::pipe(ready.data()) != 0) throw system_error("make", "a pipe");
  const UniqueFd go_from(go[0]), go_to(go[1]), ready_from(ready[0]);
  UniqueFd ready_to(ready[1]);
  const pid_t process = ::getpid(), thread = static_cast<pid_t>(::syscall(SYS_gettid));
  const pid_t tracer = ::fork();
  if (tracer == 0) {
    ::close(go[1]);
    ::close(ready[0]);
    step_through(process, thread, instructions, signal, go[0], ready[1]);
  }
  if (tracer < 0) throw system_error("start", "a process that traces this one");
  ::prctl(PR_SET_PTRACER, tracer, 0, 0, 0);
  char byte = 0;
  ready_to.reset();  // the tracer's end closes it then
  if (::write(go_to.get(), "g", 1) != 1 || ::read(ready_from.get(), &byte, 1) != 1)
    throw SystemError({.what = concat(kVariable, ": this process can't be traced"),
                       .likely = "kernel.yama.ptrace_scope is 2 or 3, or a debugger is attached",
                       .next = "use delay= (microseconds) instead of after="});
}

}  // namespace

class Plan {
 public:
  explicit Plan(const std::string& text) : faults_(faults_in(text)) {}

  void set_step(std::int64_t step) {
    is_told_ = true;
    step_ = step;
  }

  // Where nobody tells which step it is, each one that publishes gradients counts.
  void begin(Phase phase) {
    if (phase == Phase::kPublish && !is_told_) ++step_;
    Fault* const fault = next(phase, /*at_end=*/false);
    if (fault == nullptr) return;
    say(*fault, step_);
    if (fault->instructions > 0) {
      pending_.store(fault);
      send_own_after_instructions(fault->signal, fault->instructions);
    } else if (fault->microseconds > 0) {
      pending_.store(fault);
      send_own_later(fault->signal, fault->microseconds);
    } else {
      send_own(fault->signal);
    }
  }

  // A phase does not end before its fault.
  void end(Phase phase) {
    const Fault* const fault = pending_.load();
    if (fault != nullptr && fault->phase == phase) {
      pending_.store(nullptr);
      send_own(fault->signal);
    }
    if (Fault* const last = next(phase, /*at_end=*/true)) {
      say(*last, step_);
      send_own(last->signal);
    }
  }

 private:
  Fault* next(Phase phase, bool at_end) {
    const int rank = number_of("RANK"), generation = number_of("TORCHELASTIC_RESTART_COUNT");
    for (Fault& fault : faults_) {
      if (fault.phase != phase || fault.at_end != at_end || !is_at(fault.rank, rank) || !is_at(fault.step, step_) ||
          !is_at(fault.generation, generation))
        continue;
      if (!std::atomic_ref(fault.used).exchange(true)) return &fault;
    }
    return nullptr;
  }

  std::vector<Fault> faults_;
  std::atomic<bool> is_told_{false};
  std::atomic<std::int64_t> step_{-1};
  std::atomic<const Fault*> pending_{nullptr};
};

void read_plan() {
  static Plan* const read = [] {
    const char* const text = std::getenv(kVariable);
    return text == nullptr || *text == '\0' ? nullptr : new Plan(text);
  }();
  plan.store(read, std::memory_order_release);
}

void set_step(Plan& faults, std::int64_t step) { faults.set_step(step); }
void begin(Plan& faults, Phase phase) { faults.begin(phase); }
void end(Plan& faults, Phase phase) { faults.end(phase); }

}  // namespace lockstep::fault
