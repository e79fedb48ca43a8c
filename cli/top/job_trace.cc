// SPDX-License-Identifier: Apache-2.0
#include "cli/top/job_trace.h"

#include <fcntl.h>
#include <signal.h>

#include <algorithm>
#include <iostream>
#include <thread>
#include <vector>

#include "cli/top/jobs.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/observe/timeline_file.h"
#include "lockstep/observe/trace.h"
#include "lockstep/stop.h"

namespace lockstep::top {
namespace {

constexpr milliseconds kBetweenLooks{10};

int64_t from_now(milliseconds time) { return trace::now() + std::chrono::nanoseconds(time).count(); }

// Waits. Returns whether SIGINT has come.
bool is_interrupted_within(milliseconds time) {
  std::this_thread::sleep_for(time);
  return stop_signal() != 0;
}

// A rank, while it is traced.
class TracedRank {
 public:
  TracedRank(const Seat& seat, int64_t ordered) : seat_(seat), ordered_(ordered), pid_(seat.record().pid) {}

  int rank() const { return seat_.record().job_rank; }
  bool lives() const { return seat_.record().pid == pid_ && state_of(pid_) != 0; }
  bool began() const { return order().began > ordered_; }
  bool refused() const { return order().refused > ordered_; }
  bool ended() const { return order().ended > ordered_; }
  bool has_ring() const { return static_cast<bool>(ring_); }

  // Returns false if somebody else's trace is under way.
  bool ask(int64_t until) {
    int64_t before = order().until;
    asked_ = before < trace::now() && order().until.compare_exchange_strong(before, until);
    return asked_;
  }

  void set_end(int64_t until) const {
    if (asked_) order().until = until;
  }

  void open_ring() {
    ring_ = UniqueFd(::open(concat("/proc/", pid_, "/fd/", order().fd.load()).c_str(), O_RDONLY | O_CLOEXEC));
  }

  trace::Recording recording(int ranks) const {
    const std::string content = read_file(concat("/proc/self/fd/", ring_.get()));
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
  TraceRecord& order() const { return seat_.record().trace; }

  Seat seat_;
  int64_t ordered_;
  int pid_;
  bool asked_ = false;
  UniqueFd ring_{};
};

class TraceOfJob {
 public:
  explicit TraceOfJob(const JobTrace& order) : order_(order), job_(find_job(order.job)) {
    catch_stop_signals({SIGINT});
    const int64_t now = trace::now();
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
  TraceOfJob& operator=(TraceOfJob&&) = delete;

  void begin() {
    const int64_t at_most = from_now(2 * order_.patience + order_.length);
    for (TracedRank& rank : ranks_)
      if (!rank.ask(at_most)) throw is_traced(rank, "another `lockstep trace` of this job is under way");
    const Deadline deadline = Deadline::after(order_.patience);
    while (const TracedRank* const late = first_that_has_not_begun()) {
      if (deadline.passed()) throw does_not_answer(*late);
      if (is_interrupted_within(kBetweenLooks)) throw SystemError({.what = "interrupted before the trace began"});
    }
    for (TracedRank& rank : ranks_) rank.open_ring();
  }

  void record() {
    const int64_t end = from_now(order_.length);
    for (const TracedRank& rank : ranks_) rank.set_end(end);
    const Deadline deadline = Deadline::after(order_.length);
    while (!deadline.passed() && std::ranges::any_of(ranks_, &TracedRank::lives) &&
           !is_interrupted_within(std::min(deadline.left(), milliseconds(100))))
      continue;
    for (const TracedRank& rank : ranks_) rank.set_end(trace::now());
  }

  // A rank that has died or does not come to its next step has left its ring.
  void write() {
    const Deadline deadline = Deadline::after(order_.patience);
    const auto is_over = [](const TracedRank& rank) { return rank.ended() || !rank.lives(); };
    while (!std::ranges::all_of(ranks_, is_over) && !deadline.passed() && !is_interrupted_within(kBetweenLooks))
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
    return UsageError({.what = concat("rank ", rank.rank(), " of job ", job_.number, " is already being traced"),
                       .likely = likely,
                       .next = "wait until that has ended"});
  }

  SystemError has_ended() const {
    return SystemError({.what = concat("job ", job_.number, " (", job_.name, ") has ended meanwhile"),
                        .next = "trace it from its start: --trace FILE"});
  }

  const TracedRank* first_that_has_not_begun() const {
    for (const TracedRank& rank : ranks_) {
      if (rank.refused()) throw is_traced(rank, "it was started with --trace, or has no memory left");
      if (!rank.lives() && !rank.began()) throw has_ended();
    }
    const auto late = std::ranges::find_if_not(ranks_, &TracedRank::began);
    return late == ranks_.end() ? nullptr : &*late;
  }

  SystemError does_not_answer(const TracedRank& late) const {
    return SystemError(
        {.what = concat(late.describe(), ", did not begin the trace within ", human_seconds(order_.patience)),
         .likely = "it takes no steps: ranks look for a trace when a step begins",
         .next = "`lockstep top` shows what holds it up; --patience SECONDS waits longer"});
  }

  JobTrace order_;
  Job job_;
  std::vector<TracedRank> ranks_{};
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
