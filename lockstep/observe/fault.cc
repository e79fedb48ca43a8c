// SPDX-License-Identifier: Apache-2.0
#include "lockstep/observe/fault.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/base/pipe.h"
#include "lockstep/base/process/environment_switch.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/observe/rank_progress.h"

namespace lockstep::fault {
namespace {

constexpr const char* kVariable = "LOCKSTEP_FAULT";
constexpr std::array kPhasesOfPlans = {
    Named{"meeting", Phase::kMeeting},       Named{"loading", Phase::kLoading},  Named{"forward", Phase::kForward},
    Named{"backward", Phase::kBackward},     Named{"publish", Phase::kExchange}, Named{"update", Phase::kUpdate},
    Named{"validation", Phase::kValidating}, Named{"saving", Phase::kSaving},    Named{"between", Phase::kOwnCode}};
constexpr int kAny = -1;

struct Fault {
  Phase phase = Phase::kOwnCode;
  int rank = kAny;
  int step = kAny;
  int generation = 0;
  bool at_end = false;
  int instructions = 0;  // of the calling thread, after the phase's beginning
  int signal = SIGKILL;
  bool used = false;
};

// Returns false if `entry`, such as "step=7", means nothing.
bool set_entry(Fault& fault, const std::string& entry) {
  const size_t equals = std::min(entry.find('='), entry.size());
  const std::string name = entry.substr(0, equals);
  const std::string value = entry.substr(std::min(equals + 1, entry.size()));
  const std::pair<const char*, int*> numbers[] = {{"rank", &fault.rank},
                                                  {"step", &fault.step},
                                                  {"generation", &fault.generation},
                                                  {"after", &fault.instructions},
                                                  {"signal", &fault.signal}};
  if (name == "phase") {
    fault.phase = row_named(kPhasesOfPlans, value, concat(kVariable, ": phase")).value;
    return true;
  }
  if (name == "at") {
    fault.at_end = value == "end";
    return fault.at_end || value == "start";
  }
  const auto number = std::ranges::find_if(numbers, [&](const auto& each) { return name == each.first; });
  return number != std::end(numbers) && parse_int(value, *number->second) && *number->second >= 0;
}

std::vector<Fault> faults_in(const std::string& text) {
  std::vector<Fault> faults;
  const auto require = [&](bool possible, const std::string& what) {
    if (!possible)
      throw UsageError(
          {.what = concat(what, " in ", kVariable, "=\"", text, "\""),
           .next = "write it as rank=1,step=7,phase=update,after=1000, see docs/recovery.md; or unset it"});
  };
  for (const std::string& one : split(text, ';')) {
    Fault fault;
    for (const std::string& entry : split(one, ','))
      require(set_entry(fault, entry), concat("\"", entry, "\" has no meaning"));
    require(one.find("phase=") != std::string::npos, "no phase");
    require(fault.signal > 0 && fault.signal <= SIGRTMAX, concat("no signal ", fault.signal));
    faults.push_back(fault);
  }
  return faults;
}

bool is_at(int wanted, int64_t here) { return wanted == kAny || wanted == here; }

int64_t present_step() { return observe::record().step.load(std::memory_order_relaxed); }

void say(const Fault& fault) {
  const std::string line = concat(
      "lockstep: ", kVariable, ": rank ", number_in_variable("RANK"), ", step ", present_step(), ", ",
      std::ranges::find(kPhasesOfPlans, fault.phase, &Named<Phase>::value)->name, fault.at_end ? ", at its end" : "",
      fault.instructions > 0 ? concat(", after ", fault.instructions, " instructions") : "", ": signal ", fault.signal,
      "\n");
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

void send_own(int signal) { ::kill(::getpid(), signal); }

// Runs in a child of its own. Lets `thread` of `process` make so many instructions, then sends the signal. It makes system
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
  Pipe go = make_pipe(), ready = make_pipe();
  const pid_t process = ::getpid(), thread = static_cast<pid_t>(::syscall(SYS_gettid));
  const pid_t tracer = ::fork();
  if (tracer == 0) {
    go.in.reset();
    ready.out.reset();
    step_through(process, thread, instructions, signal, go.out.get(), ready.in.get());
  }
  if (tracer < 0) throw system_error("start", "a process that traces this one");
  ::prctl(PR_SET_PTRACER, tracer, 0, 0, 0);
  char byte = 0;
  ready.in.reset();  // the tracer's end closes it then
  if (::write(go.in.get(), "g", 1) != 1 || ::read(ready.out.get(), &byte, 1) != 1)
    throw SystemError({.what = concat(kVariable, ": this process can't be traced"),
                       .likely = "kernel.yama.ptrace_scope is 2 or 3, or a debugger is attached",
                       .next = "sysctl kernel.yama.ptrace_scope=1, or leave after= out"});
}

std::vector<Fault> plan;
std::atomic<const Fault*> pending{nullptr};

Fault* next(Phase phase, bool at_end) {
  const int rank = number_in_variable("RANK"), generation = number_in_variable("TORCHELASTIC_RESTART_COUNT");
  for (Fault& fault : plan) {
    if (fault.phase != phase || fault.at_end != at_end || !is_at(fault.rank, rank) ||
        !is_at(fault.step, present_step()) || !is_at(fault.generation, generation))
      continue;
    if (!std::atomic_ref(fault.used).exchange(true)) return &fault;
  }
  return nullptr;
}

}  // namespace

void read_plan() {
  static const bool is_read = [] {
    const char* const text = std::getenv(kVariable);
    if (text != nullptr && *text != '\0') plan = faults_in(text);
    return true;
  }();
  are_planned.store(is_read && !plan.empty(), std::memory_order_release);
}

// A phase does not end before its fault.
void strike(Phase phase, bool at_end) {
  if (at_end)
    if (const Fault* const fault = pending.load(); fault != nullptr && fault->phase == phase) {
      pending.store(nullptr);
      send_own(fault->signal);
    }
  Fault* const fault = next(phase, at_end);
  if (fault == nullptr) return;
  say(*fault);
  if (at_end || fault->instructions == 0) return send_own(fault->signal);
  pending.store(fault);
  send_own_after_instructions(fault->signal, fault->instructions);
}

}  // namespace lockstep::fault
