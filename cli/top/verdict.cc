// SPDX-License-Identifier: Apache-2.0
// What holds up the ranks of a job, and what to do about it. docs/watching.md says what each verdict means.
#include <algorithm>
#include <cmath>
#include <set>

#include "cli/top/view.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"

namespace lockstep::top {
namespace {

constexpr double kWorthSaying = 0.1;   // of the time
constexpr double kServerIsBusy = 0.3;  // of its workers' time, which they wait for it
constexpr double kStandsStill = 5;     // seconds without progress, and
constexpr double kSlowPhase = 60;      // in phases that may take long
constexpr double kSamePace = 0.8;      // of the fastest worker's steps a second
constexpr double kWaitsInCircle = 1;   // seconds
constexpr double kLacksCores = 0.3;    // of the time
constexpr double kMuchMore = 0.25;     // of the time, that others wait for a rank more than it waits itself

std::string percent(double share) { return concat(std::lround(100 * share), " %"); }

std::string name_of(const RankView& rank) {
  return rank.server ? concat("rank ", rank.now.rank, ", a server,") : concat("rank ", rank.now.rank);
}

// "rank 3", "ranks 0 and 3", "ranks 0, 1 and 3"
std::string names_of(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return concat("rank ", ranks.front());
  std::vector<std::string> but_last;
  for (std::size_t i = 0; i + 1 < ranks.size(); ++i) but_last.push_back(concat(ranks[i]));
  return concat("ranks ", join(but_last, ", "), " and ", ranks.back());
}

std::string doing_of(const RankView& rank) {
  const std::string phase = lockstep::name_of(rank.now.phase);
  return rank.now.step < 0 ? phase : concat(phase, " of step ", rank.now.step);
}

const RankView* rank_with_pid(const JobView& job, int pid) {
  const auto found =
      std::ranges::find_if(job.ranks, [&](const RankView& each) { return each.lives() && each.now.pid == pid; });
  return found == job.ranks.end() ? nullptr : &*found;
}

bool any_waits_for(const JobView& job, const RankView& rank) {
  return std::ranges::any_of(job.ranks, [&](const RankView& each) { return each.waits_for == rank.now.rank; });
}

class Judge {
 public:
  explicit Judge(const JobView& job) : job_(job) {}

  std::vector<Verdict> judge() {
    find_ended_and_stopped();
    find_circle();
    find_who_stands_still();
    find_who_is_not_there();
    if (verdicts_.empty()) {
      find_waits_for_data();
      find_busy_server();
      find_straggler();
      find_lack_of_cores();
      find_slow_exchange();
    }
    if (verdicts_.empty()) say_that_all_is_well();
    return std::move(verdicts_);
  }

 private:
  void say(std::string kind, std::vector<int> ranks, std::string text) {
    verdicts_.push_back({std::move(kind), std::move(ranks), std::move(text)});
  }

  void find_ended_and_stopped() {
    for (const RankView& rank : job_.ranks) {
      const int number = rank.now.rank;
      if (rank.is_known() && rank.now.state == 0 && rank.now.phase != Phase::kEnded)
        say("died", {number}, concat("rank ", number, " has died, in ", doing_of(rank)));
      if (rank.now.state == 'T')
        say("stopped", {number}, concat(name_of(rank), " is stopped by a signal; kill -CONT ", rank.now.pid));
      if (rank.now.state == 't') say("stopped", {number}, concat(name_of(rank), " is held by a debugger"));
    }
  }

  // Each waits for the next one, for a while.
  void find_circle() {
    for (const RankView& start : job_.ranks) {
      std::vector<int> circle;
      const RankView* rank = &start;
      while (rank != nullptr && waits_long(*rank) && circle.size() <= job_.ranks.size()) {
        circle.push_back(rank->now.rank);
        rank = rank_with_pid(job_, rank->now.waits_for);
        if (rank == &start) return say_circle(circle);
      }
    }
  }

  static bool waits_long(const RankView& rank) {
    return rank.now.wait_since != 0 && static_cast<double>(rank.now.at - rank.now.wait_since) * 1e-9 > kWaitsInCircle &&
           !rank.moved && !rank.server;
  }

  void say_circle(const std::vector<int>& circle) {
    const auto living = std::ranges::count_if(job_.ranks, &RankView::lives);
    const std::string who = std::ssize(circle) == living ? "all ranks" : names_of(circle);
    say("circle", circle,
        concat(who, " wait for one another, ", names_of({circle.front()}), " for rank ", circle[1 % circle.size()],
               " and so on: they make different calls; end the job, and look at its order of collectives"));
  }

  static double patience_with(Phase phase) {
    return phase == Phase::kValidating || phase == Phase::kSaving || phase == Phase::kStarting ? kSlowPhase
                                                                                               : kStandsStill;
  }

  void find_who_stands_still() {
    if (!verdicts_.empty()) return;
    for (const RankView& rank : job_.ranks) {
      const bool stands = rank.lives() && !rank.moved && rank.now.wait_since == 0 && !rank.server &&
                          rank.seconds_since_progress > patience_with(rank.now.phase);
      const bool alone = std::ranges::count_if(job_.ranks, &RankView::lives) == 1;
      if (!stands || rank.now.calls_others || !(alone || any_waits_for(job_, rank))) continue;
      say("stuck", {rank.now.rank},
          concat(names_of({rank.now.rank}), " has not moved for ", human_seconds(rank.seconds_since_progress), ", in ",
                 doing_of(rank), alone ? "" : ", and others wait for it", "; gdb -p ", rank.now.pid,
                 " shows where it is"));
    }
  }

  void find_who_is_not_there() {
    if (!verdicts_.empty()) return;
    std::vector<int> missing, meeting;
    for (const RankView& rank : job_.ranks) {
      if (!rank.is_known() || (rank.lives() && rank.now.phase == Phase::kStarting)) missing.push_back(rank.now.rank);
      if (rank.lives() && rank.now.phase == Phase::kMeeting) meeting.push_back(rank.now.rank);
    }
    if (missing.size() == job_.ranks.size()) return say("starting", missing, "no rank has used lockstep yet");
    if (!missing.empty() && !meeting.empty())
      say("meeting", missing,
          concat(names_of(missing), missing.size() == 1 ? " has" : " have",
                 " not come to the meeting yet; the others wait there"));
    else if (!meeting.empty())
      say("meeting", meeting, concat(names_of(meeting), meeting.size() == 1 ? " meets" : " meet", " the others"));
  }

  // With w workers, which never rest, s of a step is waiting: without it the step would ask for w / (1 - s). Without workers
  // loading takes s of the step, and is to fit into the rest.
  static int workers_for(const RankView& rank) {
    const double share = std::min(rank.shares.data, 0.9);
    const int workers = std::max(0, rank.now.loader_workers);
    const double needed = workers > 0 ? workers / (1 - share) : share / (1 - share);
    return std::max(workers + 1, static_cast<int>(std::ceil(needed)));
  }

  void find_waits_for_data() {
    std::vector<int> ranks;
    double most = 0;
    int workers = 0;
    for (const RankView& rank : job_.ranks) {
      if (!rank.is_worker() || rank.shares.data < kWorthSaying) continue;
      ranks.push_back(rank.now.rank);
      most = std::max(most, rank.shares.data);
      workers = std::max(workers, workers_for(rank));
    }
    if (ranks.empty()) return;
    late_.insert(ranks.begin(), ranks.end());
    const bool one = ranks.size() == 1;
    const double awaited = one ? awaited_beyond_waiting(ranks.front()) : 0;
    say("data", ranks,
        concat(names_of(ranks), one ? " waits" : " wait", " for data: ", one ? "" : "up to ", percent(most),
               one ? " of its time" : " of their time",
               awaited >= kWorthSaying ? concat(", and the others wait for it ", percent(awaited), " of theirs") : "",
               "; --workers ", workers));
  }

  // 0: it waits for the others as they do for it.
  double awaited_beyond_waiting(int number) const {
    const auto found = std::ranges::find_if(job_.ranks, [&](const RankView& each) { return each.now.rank == number; });
    return found->awaited - found->shares.wait >= kWorthSaying ? found->awaited : 0;
  }

  // Workers that wait for servers alike: it is the servers. One that waits much less than the others holds them up, if all
  // make as many steps: with asynchronous servers nobody waits for it.
  const RankView* worker_that_holds_up_others() const {
    std::vector<const RankView*> workers;
    for (const RankView& rank : job_.ranks)
      if (rank.is_worker()) workers.push_back(&rank);
    if (workers.size() < 2) return nullptr;
    const auto wait_of = [](const RankView* worker) { return worker->shares.wait; };
    const auto pace_of = [](const RankView* worker) { return worker->steps_per_second; };
    const auto [least, most] = std::ranges::minmax_element(workers, {}, wait_of);
    const auto [slowest, fastest] = std::ranges::minmax_element(workers, {}, pace_of);
    if (wait_of(*most) - wait_of(*least) <= kServerIsBusy) return nullptr;
    const bool asynchronous =
        std::ranges::any_of(job_.ranks, [](const auto& each) { return each.server && each.server->most_delay > 0; });
    return asynchronous && pace_of(*slowest) < kSamePace * pace_of(*fastest) ? nullptr : *least;
  }

  double most_wait() const {
    double most = 0;
    for (const RankView& rank : job_.ranks)
      if (rank.is_worker()) most = std::max(most, rank.shares.wait);
    return most;
  }

  void find_busy_server() {
    const auto server =
        std::ranges::max_element(job_.ranks, {}, [](const RankView& each) { return each.server ? each.awaited : -1; });
    if (server == job_.ranks.end() || !server->server || server->awaited < kServerIsBusy) return;
    const auto servers =
        std::ranges::count_if(job_.ranks, [](const RankView& each) { return each.server.has_value(); });
    if (const RankView* const slow = worker_that_holds_up_others()) return say_straggler(*slow, most_wait());
    say("server", {server->now.rank},
        concat("rank ", server->now.rank, " is a server for which the workers wait ", percent(server->awaited),
               " of their time; --servers ", servers + 1));
  }

  void find_straggler() {
    const auto rank = std::ranges::max_element(
        job_.ranks, {}, [](const RankView& each) { return each.is_worker() ? each.awaited : -1; });
    if (rank == job_.ranks.end() || !rank->is_worker() || late_.contains(rank->now.rank)) return;
    const double waits = rank->shares.wait, awaited = rank->awaited;
    if (awaited >= kWorthSaying && (waits < awaited / 2 || waits < awaited - kMuchMore)) say_straggler(*rank, awaited);
  }

  void find_lack_of_cores() {
    double most = 0;
    std::vector<int> ranks;
    for (const RankView& rank : job_.ranks) {
      if (!rank.is_worker() || rank.without_core < kLacksCores) continue;
      most = std::max(most, rank.without_core);
      ranks.push_back(rank.now.rank);
    }
    if (ranks.empty() || !verdicts_.empty()) return;
    const bool one = ranks.size() == 1;
    say("cores", ranks,
        concat(names_of(ranks), one ? " gets" : " get", " no core ", one ? "" : "up to ", percent(most),
               one ? " of its time" : " of their time",
               ": fewer ranks or --threads, or see what else runs on these cores"));
  }

  void say_straggler(const RankView& rank, double awaited) {
    say("straggler", {rank.now.rank},
        concat("rank ", rank.now.rank, " is the straggler: the others wait for it ", percent(awaited),
               " of their time; ", reason_of(rank)));
  }

  // What it does more than the others do.
  std::string reason_of(const RankView& rank) const {
    if (rank.without_core >= kWorthSaying)
      return concat("it gets no core ", percent(rank.without_core), " of its time: see what else runs on its cores");
    struct Part {
      const char* does;
      double Shares::*share;
      const char* next;
    };
    static constexpr std::array kParts = {
        Part{"computes", &Shares::compute, "compare its cores and its part of the batch with the others'"},
        Part{"validates or saves", &Shares::other, "do that less often"},
        Part{"exchanges", &Shares::exchange, "its link may be slow"},
        Part{"updates", &Shares::update, "compare its cores with the others'"}};
    static constexpr Part kOwnCode = {"runs the program's own code", &Shares::own_code,
                                      "look what it does there, such as loading or logging"};
    const Part* most = &kParts.front();
    for (const Part& part : kParts)
      if (rank.shares.*part.share - mean(part.share, rank) > rank.shares.*most->share - mean(most->share, rank))
        most = &part;
    const auto surplus = [&](double Shares::*share) { return rank.shares.*share - mean(share, rank); };
    if (most->share == &Shares::compute && surplus(&Shares::own_code) > surplus(&Shares::compute) / 2) most = &kOwnCode;
    return concat("it ", most->does, " ", percent(rank.shares.*most->share), " of its time, the others ",
                  percent(mean(most->share, rank)), ": ", most->next);
  }

  double mean(double Shares::*share, const RankView& but) const {
    double sum = 0;
    int others = 0;
    for (const RankView& rank : job_.ranks) {
      if (!rank.is_worker() || rank.now.rank == but.now.rank) continue;
      sum += rank.shares.*share;
      ++others;
    }
    return sum / std::max(1, others);
  }

  void find_slow_exchange() {
    if (job_.job.nodes < 2) return;
    double most = 0;
    for (const RankView& rank : job_.ranks) most = std::max(most, rank.shares.exchange);
    if (most >= kServerIsBusy)
      say("exchange", {},
          concat("exchanging gradients between machines takes up to ", percent(most),
                 " of the time; a larger --batch-size, --compression fp16, or --strategy averaging"));
  }

  void say_that_all_is_well() {
    double compute = 0, wait = 0, own_code = 0;
    int workers = 0;
    for (const RankView& rank : job_.ranks) {
      if (!rank.is_worker()) continue;
      compute += rank.shares.compute;
      wait += rank.shares.wait;
      own_code += rank.shares.own_code;
      ++workers;
    }
    if (workers == 0) return say("ended", {}, "all ranks have ended");
    std::string text = concat("no rank holds up the others; ", percent(compute / workers), " of the time is computing");
    if (own_code / workers >= kWorthSaying)
      text += concat(", ", percent(own_code / workers),
                     " in the program's own code (loading, too, unless lockstep's Loader does it)");
    if (wait / workers >= kWorthSaying)
      text += concat(", ", percent(wait / workers), " waiting for one another in turn");
    say("fine", {}, std::move(text));
  }

  const JobView& job_;
  std::set<int> late_{};  // for a reason that was said
  std::vector<Verdict> verdicts_{};
};

}  // namespace

std::vector<Verdict> verdicts_on(const JobView& job) { return Judge(job).judge(); }

}  // namespace lockstep::top
