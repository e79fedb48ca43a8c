// SPDX-License-Identifier: Apache-2.0
#include "agent/watch/hang_watch.h"

#include <algorithm>
#include <iostream>

#include "agent/watch/stacks.h"
#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

constexpr milliseconds kMostBetweenLooks = std::chrono::seconds(1);
constexpr milliseconds kLeastBetweenLooks{10};
constexpr milliseconds kAllStacks = std::chrono::seconds(90);  // then the rest is left out
constexpr milliseconds kKillStackTaker = std::chrono::seconds(120);

std::string status_of(pid_t pid, std::string_view field) { return proc_value(concat("/proc/", pid, "/status"), field); }

bool is_stopped(pid_t pid) { return status_of(pid, "State:").starts_with('T'); }

bool is_debugged(pid_t pid) {
  const std::string tracer = status_of(pid, "TracerPid:");
  return !tracer.empty() && tracer != "0";
}

bool is_waiting(const RankRecord& record) { return record.wait_since != 0; }
bool calls_others(const RankRecord& record) { return record.calls_others > 0; }

// "forward of step 17"
std::string doing_of(const RankRecord& record) {
  const std::string phase = name_of(record.phase.load());
  return record.step < 0 ? phase : concat(phase, " of step ", record.step);
}

// In the process that takes them.
int write_stacks(const std::vector<std::pair<int, pid_t>>& whose) {
  const Deadline deadline = Deadline::after(kAllStacks);
  for (const auto& [rank, pid] : whose) {
    std::cout << "stack of rank " << rank
              << (deadline.passed() ? " is left out: those before it took too long\n"
                                    : ", " + stacks_of(pid, deadline));
    std::cout.flush();
  }
  return 0;
}

}  // namespace

HangWatch::HangWatch(const JobPage* page, const HangOptions& options, Sink& report)
    : page_(options.timeout.count() > 0 ? page : nullptr),
      options_(options),
      interval_(std::clamp(options.timeout / 20, kLeastBetweenLooks, kMostBetweenLooks)),
      next_look_(Deadline::after(interval_)),
      report_(report),
      stacks_("  ", report) {}

std::optional<milliseconds> HangWatch::next_look() const {
  return page_ == nullptr ? std::nullopt : std::optional(next_look_.left());
}

void HangWatch::add_events(std::vector<Event>& events) {
  if (stacks_.fd() >= 0) events.push_back({stacks_.fd(), POLLIN, [this] { stacks_.read_some(); }});
}

// Every look adds the time since the last one, unless a rank has moved in between. A look that comes much too late was held
// up itself, and adds no more than two intervals.
std::optional<Hang> HangWatch::look(const Living& living) {
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
    accuse(living, suspect);
  return {};
}

// A rank that has ended moved before. Where no rank has used lockstep yet, nothing is known of them: all move.
bool HangWatch::has_moved(const Living& living) {
  seen_.resize(page_->header().ranks);
  bool moved = std::exchange(alive_, living.size()) != living.size();
  bool any_known = false;
  for (const LivingRank& rank : living) {
    const RankRecord& record = record_of(rank);
    any_known |= record.pid != 0;
    const uint64_t now = record.moves + (static_cast<uint64_t>(record.pid) << 40U);
    moved |= std::exchange(seen_[rank.local], now) != now;
  }
  return moved || !any_known;
}

bool HangWatch::may_be_slow(const Living& living, const Suspect& suspect) const {
  switch (record_of(*suspect.rank).phase) {
    case Phase::kStarting:
    case Phase::kMeeting:
    case Phase::kValidating:
    case Phase::kSaving: return true;
    case Phase::kOwnCode:
      return std::ranges::none_of(living, [this](const auto& rank) { return is_waiting(record_of(rank)); });
    default: return false;
  }
}

// ---- Who holds up the others

// A rank that waits for a second one is not to blame; the second one is, unless it waits itself, and so on. Where nobody says
// for whom it waits (on GPUs, at a meeting): one that is stopped, else the one that is furthest behind.
HangWatch::Suspect HangWatch::find_suspect(const Living& living) const {
  for (const LivingRank& rank : living)
    if (is_waiting(record_of(rank)) && record_of(rank).waits_for != kAnyPeer) return follow_waits(living, rank);
  std::optional<Suspect> found;
  for (const LivingRank& rank : living) {
    const RankRecord& record = record_of(rank);
    if (is_stopped(pid_of(rank))) return {&rank, Suspect::kStopped};
    if (is_waiting(record) || calls_others(record) || record.phase == Phase::kMeeting) continue;
    if (!found || record.step < record_of(*found->rank).step) found = Suspect{&rank, Suspect::kBehind};
  }
  const bool alone = page_->header().nodes == 1;
  return found.value_or(Suspect{&living.front(), alone ? Suspect::kCircle : Suspect::kOtherMachine});
}

HangWatch::Suspect HangWatch::follow_waits(const Living& living, const LivingRank& from) const {
  const LivingRank* last = &from;
  for (size_t others = 0; others < living.size(); ++others) {
    const RankRecord& record = record_of(*last);
    if (is_stopped(pid_of(*last)) || stands_still(record)) return {last, Suspect::kStopped};
    if (!is_waiting(record)) return {last, calls_others(record) ? Suspect::kOtherMachine : Suspect::kAwaited};
    const LivingRank* const next = with_pid(living, record.waits_for);
    if (next == nullptr) return {last, Suspect::kAwaited};
    last = next;
  }
  return {&from, Suspect::kCircle};
}

// It says that it waits, but has not looked around for long: it was stopped in its wait.
bool HangWatch::stands_still(const RankRecord& waiting) const {
  const int64_t since = trace::now() - waiting.looked_at;
  return is_waiting(waiting) && std::chrono::nanoseconds(since) > options_.timeout / 2;
}

// ---- The report

pid_t HangWatch::pid_of(const LivingRank& rank) const {
  const pid_t pid = record_of(rank).pid;
  return pid == 0 ? rank.pid : pid;
}

const LivingRank* HangWatch::with_pid(const Living& living, pid_t pid) const {
  const auto found = std::ranges::find(living, pid, [this](const LivingRank& rank) { return pid_of(rank); });
  return found == living.end() ? nullptr : &*found;
}

// "rank 0, pid 4711: exchange of step 17, waits for rank 1"
std::string HangWatch::describe(const Living& living, const LivingRank& rank) const {
  const RankRecord& record = record_of(rank);
  std::string text = concat("rank ", rank.rank, ", pid ", pid_of(rank), ": ", doing_of(record));
  if (is_waiting(record)) {
    const LivingRank* const peer = with_pid(living, record.waits_for);
    text += peer == nullptr ? ", waits for any rank" : concat(", waits for rank ", peer->rank);
  } else if (calls_others(record)) {
    text += ", in a call to other machines";
  }
  if (is_stopped(pid_of(rank))) text += ", stopped by a signal";
  return text;
}

std::string HangWatch::reason(const Living& living, const Suspect& suspect) const {
  const std::string name = concat("rank ", suspect.rank->rank);
  switch (suspect.why) {
    case Suspect::kAwaited: return name + " holds up the others";
    case Suspect::kCircle: return "the ranks wait for one another";
    case Suspect::kStopped: return name + " is stopped and holds up the others";
    case Suspect::kOtherMachine: return "all ranks of this machine wait for another machine";
    default: return living.size() == 1 ? name + " makes no progress" : name + " is the furthest behind";
  }
}

void HangWatch::accuse(const Living& living, const Suspect& suspect) {
  const LivingRank& rank = *suspect.rank;
  accused_ = Hang{
      rank.local, rank.rank,
      concat("rank ", rank.rank, " has not moved for ", human_seconds(still_), ", in ", doing_of(record_of(rank)))};
  only_report_ = options_.then == OnHang::kReport || suspect.why == Suspect::kOtherMachine;
  report_.add_line("",
                   concat("lockstep: no rank has moved for ", human_seconds(still_), ": ", reason(living, suspect)));
  for (const LivingRank& each : living) report_.add_line("  ", describe(living, each));
  take_stacks(living, rank);
}

void HangWatch::take_stacks(const Living& living, const LivingRank& first) try {
  std::vector<std::pair<int, pid_t>> whose{{first.rank, pid_of(first)}};
  for (const LivingRank& rank : living)
    if (&rank != &first) whose.emplace_back(rank.rank, pid_of(rank));
  const UniqueFd output = stacks_.open();
  stacks_until_ = Deadline::after(kKillStackTaker);
  stack_taker_.emplace(ProcessOptions{
      .body = [whose] { return write_stacks(whose); }, .output_fd = output.get(), .keeps = std::set<int>()});
} catch (const Error& error) {
  report_.add_line("  ", concat("their stacks can't be shown: ", error.text().what));
}

// Ranks may go on while a debugger looks at them: a slow disk, or a wait that a signal ends.
std::optional<Hang> HangWatch::finish_stacks() {
  const bool ended = !stack_taker_ || stack_taker_->status() || stacks_until_->passed();
  if (!ended) return {};
  if (stack_taker_) stacks_.drain();
  stack_taker_.reset();
  const std::optional<Hang> hang = std::exchange(accused_, {});
  reported_ = still_ >= options_.timeout;
  if (reported_ && !only_report_) return hang;
  report_.add_line("lockstep: ",
                   reported_ ? "no rank of this machine is killed" : "the ranks move again: none is killed");
  return {};
}

}  // namespace lockstep
