// SPDX-License-Identifier: Apache-2.0
#include "agent/start/launcher.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "agent/meet/machines.h"
#include "agent/recover/keeper.h"
#include "agent/start/events.h"
#include "agent/start/generations.h"
#include "agent/start/local_ranks.h"
#include "agent/start/stopping.h"
#include "lockstep/base/guarded.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

void require(bool holds, const std::string& what, const std::string& next) {
  if (!holds) throw UsageError({.what = what, .next = next});
}

void check(const StartOptions& start, const FailureOptions& failing, const PlaceOptions& place) {
  require(start.ranks >= 1 && start.ranks <= kMostRanksOfMachine, concat(start.ranks, " ranks on a machine"),
          concat("start 1 to ", kMostRanksOfMachine));
  require(start.servers >= 0 && start.servers < start.ranks,
          concat(start.servers, " servers among ", start.ranks, " ranks"), "leave at least one rank for a worker");
  require(place.node_rank >= 0 && place.node_rank < place.nodes,
          concat("machine ", place.node_rank, " of ", place.nodes), "count machines from 0");
  require(place.master_port >= 0 && place.master_port <= 65535, concat("port ", place.master_port),
          "choose one from 1 to 65535, or 0 for any");
  require(place.nodes == 1 || place.master_port != 0, "several machines need a port they agree on",
          "choose a free port of the machine of rank 0 and give it to every machine");
  require(failing.min_ranks <= start.ranks, concat("at least ", failing.min_ranks, " of ", start.ranks, " ranks"),
          "use at most the number of ranks");
}

bool goes_on_after_a_loss(const FailureOptions& failing) { return failing.max_restarts > 0 || failing.min_ranks > 0; }

// The variables that all ranks have alike, as long as the job runs.
Variables common_variables(const StartOptions& start, const FailureOptions& failing) {
  Variables variables = {{"LOCKSTEP_MIN_RANKS", concat(failing.min_ranks)}};
  if (goes_on_after_a_loss(failing)) variables.emplace_back("TORCHELASTIC_MAX_RESTARTS", concat(failing.max_restarts));
  if (start.servers > 0) variables.emplace_back("LOCKSTEP_LOCAL_SERVERS", concat(start.servers));
  if (std::getenv("OMP_NUM_THREADS") == nullptr)
    variables.emplace_back("OMP_NUM_THREADS", concat(std::max(1, allotted_cores() / (start.ranks - start.servers))));
  return variables;
}

// One launch: run() starts the ranks and returns when every one has ended. Destroyed, it has left no process behind.
class Job {
 public:
  Job(const StartOptions& start, const FailureOptions& failing, const PlaceOptions& place, const ProcessOptions& what,
      Sinks& sinks)
      : servers_(start.servers),
        failing_(failing),
        machines_(place.machines.get()),
        ranks_(start, place, failing.hang, what, signals_, keeper_.get(), sinks) {}

  LaunchResult run() {
    for (LocalRank& rank : ranks_) ranks_.start(rank);
    while (!has_ended_everywhere()) wait_for_events();
    ranks_.end_what_they_left();
    return result();
  }

 private:
  std::unique_ptr<Keeper> make_keeper() {
    if (!goes_on_after_a_loss(failing_)) return {};
    const auto on_met = [this](int seat, int generation) {
      generations_.on_met(seat, generation);
      if (!stopping_.has_begun()) ranks_.start_spare();
    };
    const auto on_next = [this](int seat, int generation) { generations_.on_next(seat, generation); };
    return std::make_unique<Keeper>(on_met, on_next);
  }

  bool has_ended_everywhere() const {
    if (ranks_.count_alive() > 0) return false;
    if (!machines_) return true;
    return stopping_.has_begun() ? stopping_.others_know() : machines_->all_done();
  }

  void wait_for_events() {
    std::vector<LocalRank*> ended;
    std::vector<Event> events = {{signals_.fd(), POLLIN, [this] { stopping_.on_signal(signals_.next()); }}};
    if (keeper_) keeper_->add_events(events);
    if (machines_) std::ranges::move(machines_->events(), std::back_inserter(events));
    ranks_.add_events(events, ended);
    poll_events(events, milliseconds_to_wait());
    on_ended(ended);
    if (machines_) follow_machines();
    if (!stopping_.has_begun()) generations_.decide_without_a_loss();
    stopping_.kill_when_due();
    if (!stopping_.has_begun() && ranks_.kill_the_one_that_hangs() && failing_.hang.then == OnHang::kEnd)
      may_go_on_ = false;
  }

  // While the job runs, the end of each rank, every signal and all output wake this process, and the time to look whether
  // ranks hang. Ranks that wait for a word about others, none of which has ended, have the grace period. Once the ranks
  // are told to stop, the grace period is the deadline; after SIGKILL only the kernel is waited for.
  int milliseconds_to_wait() const {
    std::optional<milliseconds> wait;
    const auto at_most = [&wait](milliseconds time) { wait = wait ? std::min(*wait, time) : time; };
    if (stopping_.kill_at()) at_most(stopping_.kill_at()->left());
    if (!stopping_.has_begun() && generations_.decides_at()) at_most(generations_.decides_at()->left());
    if (const auto next = ranks_.next_look(); next && !stopping_.has_begun()) at_most(*next);
    if (machines_) at_most(Machines::longest_wait());
    return wait ? static_cast<int>(wait->count()) : -1;
  }

  // Begins with those that a signal has ended: others that are found at the same time may have failed because of them.
  void on_ended(std::vector<LocalRank*>& ended) {
    if (keeper_ && !ended.empty()) keeper_->read_all();  // a generation that was complete is, before the next begins
    std::ranges::stable_partition(ended, [](const LocalRank* rank) { return rank->end->signal != 0; });
    for (LocalRank* rank : ended) {
      const bool has_its_successor = rank->is_alive();  // it was restarted because of one before it
      if (!has_its_successor && !stopping_.has_begun() && !rank->is_gone) after_end_of(*rank);
    }
    // Once the servers have ended, the workers have little left to do; one that hangs is killed.
    if (failing_.workers_may_fail && servers_have_ended()) stopping_.give_the_grace_period();
  }

  void after_end_of(LocalRank& rank) {
    if (!rank.end->failed())
      generations_.rejoin(rank);
    else if (stopping_.is_stop(*rank.end))
      has_stopped_ = true;
    else if (can_do_without(rank))
      log_warning(concat("rank ", rank.rank, " ", how_it_ended(*rank.end), "; the job goes on without it"));
    else if (!may_go_on_after(*rank.end) || !generations_.go_on_after(rank))
      on_failed(rank);
  }

  bool may_go_on_after(const ExitStatus& end) const {
    return may_go_on_ && !stopping_.was_signalled() && end.exit_code != kUsage;
  }

  // The job continues without `rank`: other workers are running, or have succeeded.
  bool can_do_without(const LocalRank& rank) const {
    if (!failing_.workers_may_fail || !may_go_on_ || ranks_.is_server(rank)) return false;
    return std::any_of(ranks_.begin() + servers_, ranks_.end(),
                       [](const LocalRank& other) { return !other.end || !other.end->failed(); });
  }

  bool servers_have_ended() const {
    return servers_ > 0 && std::all_of(ranks_.begin(), ranks_.begin() + servers_,
                                       [](const LocalRank& server) { return server.end.has_value(); });
  }

  void on_failed(const LocalRank& rank) {
    if (machines_)
      machines_->end_job(concat("rank ", rank.rank, " on ", machines_->me().host(), " ", how_it_ended(*rank.end)));
    failed_ = &rank;
    stopping_.after_failure();
  }

  void follow_machines() {
    machines_->work();
    for (const std::string& words : machines_->take_words()) log_warning(words);
    if (stopping_.has_begun()) return;
    if ((lost_ = machines_->end())) return stopping_.kill();
    generations_.follow_epochs();
    const auto is_done = [this](const LocalRank& rank) {
      return rank.end && (!rank.end->failed() || stopping_.is_stop(*rank.end));
    };
    if (std::ranges::all_of(ranks_, is_done)) machines_->finish();
  }

  // When every rank has ended.
  LaunchResult result() const {
    LaunchResult result{.restarts = generations_.restarts(), .lost = lost_};
    const auto has_stopped = [this](const LocalRank& rank) { return stopping_.is_stop(*rank.end); };
    if (lost_) {
      result.exit_code = kFailed;
    } else if (failed_ != nullptr) {
      result.failure = ranks_.failure_of(*failed_);
      result.exit_code = failed_->end->code();
    } else if (stopping_.caught_signal() != 0) {
      const bool all_have_stopped = failing_.stop_code && std::ranges::all_of(ranks_, has_stopped);
      result.exit_code = all_have_stopped ? *failing_.stop_code : kSignalBase + stopping_.caught_signal();
    } else if (has_stopped_) {
      result.exit_code = failing_.stop_code.value_or(kSignalBase + SIGTERM);
    }
    return result;
  }

  const int servers_;
  const FailureOptions& failing_;
  Machines* const machines_;  // null: they do not number themselves
  const SignalReader signals_{failing_.stop_signals};
  const std::unique_ptr<Keeper> keeper_ = make_keeper();  // while lost ranks may be replaced
  LocalRanks ranks_;
  Stopping stopping_{failing_, machines_, ranks_};
  Generations generations_{failing_, machines_, ranks_, keeper_.get()};
  bool may_go_on_ = true;              // after a loss
  bool has_stopped_ = false;           // a rank, because it was asked to
  const LocalRank* failed_ = nullptr;  // the first; none is started after it
  std::optional<std::string> lost_{};  // why this machine can't go on without others
};

LaunchResult launch(const StartOptions& start, ProcessOptions what, const FailureOptions& failing,
                    const PlaceOptions& place) {
  check(start, failing, place);
  raise_descriptor_limit();
  what.variables = common_variables(start, failing);
  what.keeps = all_descriptors();  // those that the launcher opens from now on are its own
  Sinks sinks;
  const LaunchResult result = Job(start, failing, place, what, sinks).run();  // the job is gone before the rest
  sinks.flush();  // blocks if the reader has stopped, but signals are back to normal
  return result;
}

std::string likely_cause(int signal) {
  switch (signal) {
    case 0: return "an error in the program";
    case SIGKILL: return "out of memory on this machine, or killed by somebody";
    case SIGINT:
    case SIGTERM:
    case SIGHUP: return "somebody stopped this rank";
    default: return "a bug in the program";
  }
}

}  // namespace

LaunchResult launch(const StartOptions& start, const std::vector<std::string>& command, const FailureOptions& failing,
                    const PlaceOptions& place) {
  return launch(start, ProcessOptions{.command = command}, failing, place);
}

LaunchResult launch(const StartOptions& start, const std::function<int()>& body, const FailureOptions& failing,
                    const PlaceOptions& place) {
  return launch(start, ProcessOptions{.body = body}, failing, place);
}

std::string describe(const RankFailure& failure) {
  const bool hung = !failure.hang.empty();
  const Error error(
      "RankFailed",
      {.what = hung ? concat(failure.hang, ", and was killed")
                    : concat("rank ", failure.rank, " ", how_it_ended(failure.end)),
       .here = concat("rank ", failure.rank, " of ", failure.world_size, ", pid ", failure.pid),
       .likely = hung ? "an endless loop, a deadlock, a stopped process, or a disk or device that does not answer"
                      : likely_cause(failure.end.signal),
       .next = hung                  ? "read its stack above; if it only needs longer, raise --hang-timeout"
               : failure.log.empty() ? "look at its output above"
                                     : "read " + failure.log});
  std::string text = error.what();
  if (!failure.last_lines.empty())
    text += concat("\n  last lines of its stderr:\n    ", join(failure.last_lines, "\n    "));
  return text;
}

}  // namespace lockstep
