// SPDX-License-Identifier: Apache-2.0
#include "cli/top/job_trace.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <vector>

#include "cli/top/jobs.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/timeline_file.h"
#include "lockstep/base/to_size.h"
#include "lockstep/base/trace.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep::top {
namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kBetweenLooks{10};

std::int64_t from_now(Milliseconds time) { return trace::now() + std::chrono::nanoseconds(time).count(); }

// SIGINT, while this lives: waits end, and the process does not.
class Interruptible {
 public:
  Interruptible() {
    ::sigemptyset(&signals_);
    ::sigaddset(&signals_, SIGINT);
    ::sigprocmask(SIG_BLOCK, &signals_, &before_);
  }
  ~Interruptible() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  bool happened_within(Milliseconds time) {
    const timespec wait{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
    happened_ = happened_ || ::sigtimedwait(&signals_, nullptr, &wait) == SIGINT;
    return happened_;
  }

 private:
  sigset_t signals_{};
  sigset_t before_{};
  bool happened_ = false;
};

// A rank, while it is traced.
class TracedRank {
 public:
  TracedRank(const Seat& seat, std::int64_t ordered) : seat_(seat), ordered_(ordered), pid_(seat.record().pid) {}

  int rank() const { return seat_.record().job_rank; }
  bool lives() const { return seat_.record().pid == pid_ && state_of(pid_) != 0; }
  bool began() const { return trace().began > ordered_; }
  bool refused() const { return trace().refused > ordered_; }
  bool ended() const { return trace().ended > ordered_; }
  bool has_ring() const { return static_cast<bool>(ring_); }

  // False: somebody else's trace is under way.
  bool order(std::int64_t until) {
    std::int64_t before = trace().until;
    asked_ = before < trace::now() && trace().until.compare_exchange_strong(before, until);
    return asked_;
  }

  void set_end(std::int64_t until) const {
    if (asked_) trace().until = until;
  }

  void open_ring() {
    const std::string path = concat("/proc/", pid_, "/fd/", trace().fd.load());
    ring_ = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  }

  trace::Recording recording(int ranks) const {
    struct stat found {};
    ::fstat(ring_.get(), &found);
    std::string content(to_size(found.st_size), '\0');
    if (::pread(ring_.get(), content.data(), content.size(), 0) != std::ssize(content))
      throw system_error("read the trace of", concat("rank ", rank()));
    trace::Recording recording = trace::parse(content, concat("the trace of rank ", rank()));
    recording.process.ranks = ranks;
    return recording;
  }

  // "rank 1, in forward of step 17"
  std::string describe() const {
    const RankRecord& record = seat_.record();
    return concat("rank ", rank(), ", in ", name_of(record.phase.load()), " of step ", record.step.load(),
                  state_of(record.pid) == 'T' ? ", stopped by a signal" : "");
  }

 private:
  TraceRecord& trace() const { return seat_.record().trace; }

  Seat seat_;
  std::int64_t ordered_;
  int pid_;
  bool asked_ = false;
  UniqueFd ring_{};
};

class TraceOfJob {
 public:
  explicit TraceOfJob(const JobTrace& order) : order_(order), job_(find_job(order.job)) {
    const std::int64_t now = trace::now();
    for (const Seat& seat : job_.seats)
      if (seat.record().pid != 0 && seat.record().phase != Phase::kEnded) ranks_.emplace_back(seat, now);
    if (ranks_.empty())
      throw UsageError({.what = concat("job ", job_.number, " has no rank that uses lockstep"),
                        .next = "wait until its ranks have met"});
  }

  // Whatever happens, the ranks end their traces.
  ~TraceOfJob() {
    for (const TracedRank& rank : ranks_) rank.set_end(trace::now());
  }
  TraceOfJob(const TraceOfJob&) = delete;
  TraceOfJob& operator=(const TraceOfJob&) = delete;

  void begin() {
    const std::int64_t at_most = from_now(2 * order_.patience + order_.length);
    for (TracedRank& rank : ranks_)
      if (!rank.order(at_most)) throw is_traced(rank, "another `lockstep trace` of this job is under way");
    wait_until(&TracedRank::began, "begin");
    for (TracedRank& rank : ranks_) rank.open_ring();
  }

  void record() {
    const std::int64_t end = from_now(order_.length);
    for (const TracedRank& rank : ranks_) rank.set_end(end);
    const Deadline deadline = Deadline::after(order_.length);
    while (!deadline.passed() && any_lives() &&
           !interrupt_.happened_within(std::min(deadline.left(), Milliseconds(100))))
      continue;
    for (const TracedRank& rank : ranks_) rank.set_end(trace::now());
  }

  // A rank that has died or does not come to its next step has left its ring.
  void write() {
    const Deadline deadline = Deadline::after(order_.patience);
    const auto is_over = [](const TracedRank& rank) { return rank.ended() || !rank.lives(); };
    while (!std::ranges::all_of(ranks_, is_over) && !deadline.passed() && !interrupt_.happened_within(kBetweenLooks))
      continue;
    Recordings recordings;
    bool complete = has_all_ranks();
    for (const TracedRank& rank : ranks_) {
      complete = complete && rank.ended();
      if (!rank.ended()) log_warning(concat("the trace has what was recorded of ", rank.describe(), ", so far"));
      if (rank.has_ring()) recordings.push_back(rank.recording(ranks_of_job()));
    }
    if (recordings.empty()) throw has_ended();
    warn_of_missing();
    write_timeline(order_.file, recordings, complete);
  }

  std::string summary() const {
    const std::string of = has_all_ranks() ? "" : concat(" of ", ranks_of_job());
    return concat("job ", job_.number, " (", job_.name, "), ", ranks_.size(), of,
                  ranks_of_job() == 1 ? " rank: " : " ranks: ", order_.file, "\n");
  }

 private:
  int ranks_of_job() const { return std::max(job_.world_size, static_cast<int>(job_.seats.size())); }
  bool has_all_ranks() const { return std::ssize(ranks_) == ranks_of_job(); }

  void warn_of_missing() const {
    const auto idle = job_.seats.size() - ranks_.size();
    const auto elsewhere = to_size(ranks_of_job()) - job_.seats.size();
    if (idle > 0) log_warning(concat("the trace lacks ", idle, " ranks that have ended or have not used lockstep yet"));
    if (elsewhere > 0)
      log_warning(concat("the trace lacks the ", elsewhere, " of ", ranks_of_job(),
                         " ranks that are not on this machine; run `lockstep trace` on theirs for a trace of its own"));
  }

  UsageError is_traced(const TracedRank& rank, const std::string& likely) const {
    return UsageError({.what = concat("rank ", rank.rank(), " of job ", job_.number, " is being traced already"),
                       .likely = likely,
                       .next = "wait until that has ended"});
  }

  SystemError has_ended() const {
    return SystemError({.what = concat("job ", job_.number, " (", job_.name, ") has ended meanwhile"),
                        .next = "trace it from its start: --trace FILE"});
  }

  void wait_until(bool (TracedRank::*has)() const, const char* what) {
    const Deadline deadline = Deadline::after(order_.patience);
    while (true) {
      const auto late = std::ranges::find_if(ranks_, [&](const TracedRank& rank) { return !(rank.*has)(); });
      if (late == ranks_.end()) return;
      for (const TracedRank& rank : ranks_) {
        if (rank.refused()) throw is_traced(rank, "it was started with --trace, or has no memory left");
        if (!rank.lives() && !rank.began()) throw has_ended();
      }
      if (deadline.passed()) throw does_not_answer(*late, what);
      if (interrupt_.happened_within(kBetweenLooks)) throw SystemError({.what = "interrupted before the trace began"});
    }
  }

  SystemError does_not_answer(const TracedRank& late, const char* what) const {
    return SystemError({.what = concat(late.describe(), ", did not ", what, " the trace within ",
                                       human_seconds(std::chrono::duration<double>(order_.patience).count())),
                        .likely = "it takes no steps: ranks look for a trace when a step begins",
                        .next = "`lockstep top` shows what holds it up; --patience SECONDS waits longer"});
  }

  bool any_lives() const { return std::ranges::any_of(ranks_, &TracedRank::lives); }

  JobTrace order_;
  Job job_;
  std::vector<TracedRank> ranks_{};
  Interruptible interrupt_;
};

}  // namespace

void trace_job(const JobTrace& order) {
  require_timeline_file(order.file);
  TraceOfJob trace(order);
  trace.begin();
  trace.record();
  trace.write();
  std::cout << trace.summary();
}

}  // namespace lockstep::top
