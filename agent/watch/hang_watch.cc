// SPDX-License-Identifier: Apache-2.0
#include "agent/watch/hang_watch.h"

#include <algorithm>
#include <iostream>

#include "agent/watch/stacks.h"
#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

constexpr milliseconds kMostBetweenLooks = std::chrono::seconds(1);
constexpr milliseconds kLeastBetweenLooks{10};
constexpr milliseconds kAllStacks = std::chrono::seconds(90);  // then the rest is left out
constexpr milliseconds kKillStackTaker = std::chrono::seconds(120);

milliseconds between_looks(milliseconds timeout) {
  return std::clamp(timeout / 20, kLeastBetweenLooks, kMostBetweenLooks);
}

std::string status_of(pid_t pid, std::string_view field) { return proc_value(concat("/proc/", pid, "/status"), field); }

bool is_stopped(pid_t pid) { return status_of(pid, "State:").starts_with('T'); }

bool is_debugged(pid_t pid) {
  const std::string tracer = status_of(pid, "TracerPid:");
  return !tracer.empty() && tracer != "0";
}

Phase phase_of(const RankRecord& record) { return record.phase.load(std::memory_order_acquire); }
std::int64_t step_of(const RankRecord& record) { return record.step.load(std::memory_order_relaxed); }
bool is_waiting(const RankRecord& record) { return record.wait_since.load(std::memory_order_acquire) != 0; }
bool calls_others(const RankRecord& record) { return record.calls_others.load(std::memory_order_relaxed) > 0; }
bool is_known(const RankRecord& record) { return record.pid.load(std::memory_order_relaxed) != 0; }

// "forward of step 17"
std::string doing_of(const RankRecord& record) {
  const std::string phase = name_of(phase_of(record));
  return step_of(record) < 0 ? phase : concat(phase, " of step ", step_of(record));
}

// In the process that takes them.
int write_stacks(const std::vector<std::pair<std::string, pid_t>>& whose) {
  const Deadline deadline = Deadline::after(kAllStacks);
  for (const auto& [name, pid] : whose) {
    if (deadline.passed())
      std::cout << "stack of " << name << " is left out: those before it took too long\n";
    else
      std::cout << "stack of " << name << ", " << stacks_of(pid, deadline);
    std::cout.flush();
  }
  return 0;
}

}  // namespace

HangWatch::HangWatch(const JobPage* page, const HangOptions& options, Sink& report)
    : page_(options.timeout.count() > 0 ? page : nullptr),
      options_(options),
      interval_(between_looks(options.timeout)),
      next_look_(Deadline::after(interval_)),
      report_(report),
      stacks_("  ", report) {}

std::optional<milliseconds> HangWatch::next_look() const {
  return page_ == nullptr ? std::nullopt : std::optional(next_look_.left());
}

void HangWatch::add_events(std::vector<Event>& events) {
  if (stacks_.fd() >= 0) events.push_back({stacks_.fd(), POLLIN, [this] { stacks_.read_some(); }});
}

std::vector<int> HangWatch::descriptors() const {
  std::vector<int> fds;
  if (stacks_.fd() >= 0) fds.push_back(stacks_.fd());
  if (stack_taker_) fds.push_back(stack_taker_->pidfd());
  return fds;
}

// Every look adds the time since the last one, unless a rank has moved in between. A look that comes much too late was held
// up itself, and adds no more than two intervals.
std::optional<Hang> HangWatch::look(const Living& living, const std::vector<int>& close_in_child) {
  if (page_ == nullptr || living.empty() || !next_look_.passed()) return {};
  next_look_ = Deadline::after(interval_);
  const auto now = Deadline::Clock::now();
  const auto passed = std::min<std::chrono::nanoseconds>(now - std::exchange(last_look_, now), 2 * interval_);
  still_ = has_moved(living) ? std::chrono::nanoseconds(0) : still_ + passed;
  if (still_.count() == 0) reported_ = false;
  if (accused_) return finish_stacks();
  if (reported_ || still_ < options_.timeout) return {};
  const Suspect suspect = find_suspect(living);
  if (may_be_slow(living, suspect) && still_ < kPatienceWithSlowPhases * options_.timeout) return {};
  // A rank may have moved while it was judged: a phase that may be slow may just have ended.
  if (has_moved(living) || std::ranges::any_of(living, [&](const auto& rank) { return is_debugged(pid_of(rank)); }))
    still_ = {};
  else
    accuse(living, suspect, close_in_child);
  return {};
}

// A rank that has ended moved before. Where no rank has used lockstep yet, nothing is known of them: all move.
bool HangWatch::has_moved(const Living& living) {
  seen_.resize(to_size(page_->header().ranks));
  bool moved = std::exchange(alive_, living.size()) != living.size();
  bool any_known = false;
  for (const LivingRank& rank : living) {
    const RankRecord& record = page_->record(rank.local);
    any_known |= is_known(record);
    const std::uint64_t now = record.moves.load(std::memory_order_relaxed) +
                              (static_cast<std::uint64_t>(record.pid.load(std::memory_order_relaxed)) << 40U);
    moved |= std::exchange(seen_[to_size(rank.local)], now) != now;
  }
  return moved || !any_known;
}

bool HangWatch::may_be_slow(const Living& living, const Suspect& suspect) const {
  switch (phase_of(page_->record(living[to_size(suspect.index)].local))) {
    case Phase::kStarting:
    case Phase::kMeeting:
    case Phase::kValidating:
    case Phase::kSaving: return true;
    case Phase::kOwnCode:
      return std::ranges::none_of(living, [this](const auto& rank) { return is_waiting(page_->record(rank.local)); });
    default: return false;
  }
}

// ---- Who holds up the others

// A rank that waits for a second one is not to blame; the second one is, unless it waits itself, and so on. Where nobody says
// for whom it waits (on GPUs, at a meeting): one that is stopped, else the one that is furthest behind.
HangWatch::Suspect HangWatch::find_suspect(const Living& living) const {
  for (int i = 0; i < std::ssize(living); ++i) {
    const RankRecord& record = page_->record(living[to_size(i)].local);
    if (is_waiting(record) && record.waits_for.load(std::memory_order_relaxed) != kAnyPeer)
      return follow_waits(living, i);
  }
  std::optional<Suspect> found;
  for (int i = 0; i < std::ssize(living); ++i) {
    const RankRecord& record = page_->record(living[to_size(i)].local);
    if (is_stopped(pid_of(living[to_size(i)]))) return {i, Suspect::Why::kStopped};
    if (is_waiting(record) || calls_others(record) || phase_of(record) == Phase::kMeeting) continue;
    if (!found || step_of(record) < step_of(page_->record(living[to_size(found->index)].local)))
      found = Suspect{i, Suspect::Why::kBehind};
  }
  const bool alone = page_->header().nodes == 1;
  return found.value_or(Suspect{0, alone ? Suspect::Why::kCircle : Suspect::Why::kOtherMachine});
}

HangWatch::Suspect HangWatch::follow_waits(const Living& living, int from) const {
  int last = from;
  for (std::size_t others = 0; others < living.size(); ++others) {
    const RankRecord& record = page_->record(living[to_size(last)].local);
    if (is_stopped(pid_of(living[to_size(last)])) || stands_still(record)) return {last, Suspect::Why::kStopped};
    if (!is_waiting(record)) return {last, calls_others(record) ? Suspect::Why::kOtherMachine : Suspect::Why::kAwaited};
    const auto found = with_pid(living, record.waits_for.load(std::memory_order_relaxed));
    if (found == living.end()) return {last, Suspect::Why::kAwaited};
    last = static_cast<int>(found - living.begin());
  }
  return {from, Suspect::Why::kCircle};
}

// It says that it waits, but has not looked around for long: it was stopped in its wait.
bool HangWatch::stands_still(const RankRecord& waiting) const {
  const std::int64_t since = trace::now() - waiting.looked_at.load(std::memory_order_relaxed);
  return is_waiting(waiting) && std::chrono::nanoseconds(since) > options_.timeout / 2;
}

// ---- The report

pid_t HangWatch::pid_of(const LivingRank& rank) const {
  const pid_t pid = page_->record(rank.local).pid.load(std::memory_order_relaxed);
  return pid == 0 ? rank.pid : pid;
}

HangWatch::Living::const_iterator HangWatch::with_pid(const Living& living, pid_t pid) const {
  return std::ranges::find_if(living, [&](const LivingRank& rank) { return pid_of(rank) == pid; });
}

// "rank 0, pid 4711: exchange of step 17, waits for rank 1"
std::string HangWatch::describe(const Living& living, const LivingRank& rank) const {
  const RankRecord& record = page_->record(rank.local);
  std::string text = concat("rank ", rank.rank, ", pid ", pid_of(rank), ": ", doing_of(record));
  if (is_waiting(record)) {
    const auto peer = with_pid(living, record.waits_for.load(std::memory_order_relaxed));
    text += peer == living.end() ? ", waits for any rank" : concat(", waits for rank ", peer->rank);
  } else if (calls_others(record)) {
    text += ", in a call to other machines";
  }
  if (is_stopped(pid_of(rank))) text += ", stopped by a signal";
  return text;
}

std::string HangWatch::reason(const Living& living, const Suspect& suspect) const {
  const std::string name = concat("rank ", living[to_size(suspect.index)].rank);
  switch (suspect.why) {
    case Suspect::Why::kAwaited: return name + " holds up the others";
    case Suspect::Why::kCircle: return "the ranks wait for one another";
    case Suspect::Why::kStopped: return name + " is stopped and holds up the others";
    case Suspect::Why::kOtherMachine: return "all ranks of this machine wait for another machine";
    default: return living.size() == 1 ? name + " makes no progress" : name + " is the furthest behind";
  }
}

void HangWatch::accuse(const Living& living, const Suspect& suspect, const std::vector<int>& close_in_child) {
  const LivingRank& rank = living[to_size(suspect.index)];
  accused_ = Hang{rank.local, rank.rank,
                  concat("rank ", rank.rank, " has not moved for ", human_seconds(still_), ", in ",
                         doing_of(page_->record(rank.local)))};
  only_report_ = options_.then == OnHang::kReport || suspect.why == Suspect::Why::kOtherMachine;
  report_.add_line("",
                   concat("lockstep: no rank has moved for ", human_seconds(still_), ": ", reason(living, suspect)));
  for (const LivingRank& each : living) report_.add_line("  ", describe(living, each));
  take_stacks(living, suspect.index, close_in_child);
}

void HangWatch::take_stacks(const Living& living, int first, const std::vector<int>& close_in_child) try {
  std::vector<std::pair<std::string, pid_t>> whose;
  for (const LivingRank& rank : living) whose.emplace_back(concat("rank ", rank.rank), pid_of(rank));
  std::rotate(whose.begin(), whose.begin() + first, std::next(whose.begin(), first + 1));
  const UniqueFd output = stacks_.open();
  std::vector<int> close = close_in_child;
  close.insert(close.end(), {output.get(), stacks_.fd()});
  stacks_until_ = Deadline::after(kKillStackTaker);
  stack_taker_.emplace(ProcessOptions{
      .body = [whose] { return write_stacks(whose); }, .output_fd = output.get(), .close_in_child = close});
} catch (const Error& error) {
  report_.add_line("  ", concat("their stacks can't be shown: ", error.text().what));
}

// Ranks may go on while a debugger looks at them: a slow disk, or a wait that a signal ends.
std::optional<Hang> HangWatch::finish_stacks() {
  const bool ended = !stack_taker_ || stack_taker_->status() || stacks_until_->passed();
  if (!ended) return {};
  if (stack_taker_) stacks_.drain();
  stack_taker_.reset();
  const Hang hang = *std::exchange(accused_, {});
  reported_ = true;
  if (still_ < options_.timeout) {
    reported_ = false;
    report_.add_line("lockstep: ", "the ranks move again: none is killed");
    return {};
  }
  if (only_report_) {
    report_.add_line("lockstep: ", "no rank of this machine is killed");
    return {};
  }
  return hang;
}

}  // namespace lockstep
