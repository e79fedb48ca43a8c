// SPDX-License-Identifier: Apache-2.0
// agent/watch/hang_watch.h: notices that all ranks of a machine are alive and none moves, finds the one that holds up the others,
// and shows where each of them is.
//
// Flow:    job_page.h -> here -> a report on stderr with the ranks' stacks -> the launcher, which ends the rank
// Owns:    while it takes stacks, one process that runs the debugger; it never blocks itself
// Threads: the launcher's only one
//
// docs/recovery.md says what counts as a hang.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "agent/start/events.h"
#include "agent/start/output.h"
#include "agent/start/process.h"
#include "agent/watch/hang_options.h"
#include "lockstep/base/int_vector.h"
#include "lockstep/deadline.h"
#include "lockstep/observe/job_page.h"

namespace lockstep {

// A rank that does what may take long has so many timeouts.
constexpr int kPatienceWithSlowPhases = 10;

struct LivingRank {
  int local = 0;
  int rank = 0;   // of the job
  pid_t pid = 0;  // of the process that the launcher has started
};

struct Hang {
  int local = 0;
  int rank = 0;
  std::string what;  // "rank 1 has not moved for 4:00, in forward of step 17"
};

class HangWatch {
 public:
  HangWatch(const JobPage* page, const HangOptions& options, Sink& report);  // null: never finds anything

  std::optional<milliseconds> next_look() const;  // when look() wants to be called; nothing: never
  void add_events(std::vector<Event>& events);    // for the launcher's poll

  // After each poll: the rank to be killed, once, after its stack was shown.
  std::optional<Hang> look(const std::vector<LivingRank>& living);

 private:
  struct Suspect {
    const LivingRank* rank;
    enum { kAwaited, kCircle, kStopped, kBehind, kOtherMachine } why;
  };
  using Living = std::vector<LivingRank>;

  const RankRecord& record_of(const LivingRank& rank) const { return page_->record(rank.local); }
  bool has_moved(const Living& living);
  bool may_be_slow(const Living& living, const Suspect& suspect) const;
  Suspect find_suspect(const Living& living) const;
  Suspect follow_waits(const Living& living, const LivingRank& from) const;
  bool stands_still(const RankRecord& waiting) const;
  std::string describe(const Living& living, const LivingRank& rank) const;
  std::string reason(const Living& living, const Suspect& suspect) const;
  pid_t pid_of(const LivingRank& rank) const;
  const LivingRank* with_pid(const Living& living, pid_t pid) const;
  void accuse(const Living& living, const Suspect& suspect);
  void take_stacks(const Living& living, const LivingRank& first);
  std::optional<Hang> finish_stacks();

  const JobPage* page_;
  HangOptions options_;
  milliseconds interval_;
  Deadline next_look_;
  Deadline::Clock::time_point last_look_ = Deadline::Clock::now();
  std::chrono::nanoseconds still_{0};  // how long no rank has moved, while this process watched
  size_t alive_ = 0;                   // ranks at the last look
  IntVector<uint64_t> seen_;           // what has to change in each record, by local rank
  bool reported_ = false;              // since a rank moved last
  std::optional<Hang> accused_;        // while its stack is taken
  bool only_report_ = false;
  Sink& report_;
  RankStream stacks_;
  std::optional<Process> stack_taker_;
  std::optional<Deadline> stacks_until_;
};

}  // namespace lockstep
