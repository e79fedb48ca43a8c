// SPDX-License-Identifier: Apache-2.0
#include "agent/start/launcher.h"

#include <algorithm>
#include <iterator>

#include "agent/meet/machines.h"
#include "agent/recover/keeper.h"
#include "agent/start/events.h"
#include "agent/start/generations.h"
#include "agent/start/local_ranks.h"
#include "agent/start/stopping.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr int kUsageError = 2;  // the exit code of one; a new process would make the same one

void check(const LaunchOptions& options) {
  const auto require = [](bool holds, const std::string& what, const std::string& next) {
    if (!holds) throw UsageError({.what = what, .next = next});
  };
  require(options.ranks >= 1, concat(options.ranks, " ranks on a machine"), "start at least 1");
  require(options.servers >= 0 && (options.servers == 0 || options.servers < options.ranks),
          concat(options.servers, " servers among ", options.ranks, " ranks"), "leave at least one rank for a worker");
  require(options.nodes >= 1, concat(options.nodes, " machines"), "use at least 1");
  require(options.node_rank >= 0 && options.node_rank < options.nodes,
          concat("machine ", options.node_rank, " of ", options.nodes), "count machines from 0");
  require(options.master_port >= 0 && options.master_port <= 65535, concat("port ", options.master_port),
          "choose one from 1 to 65535, or 0 for any");
  require(options.nodes == 1 || options.master_port != 0, "several machines need a port they agree on",
          "choose a free port of the machine of rank 0 and give it to every machine");
  require(options.max_restarts >= 0, concat(options.max_restarts, " restarts"), "use 0 or more");
  require(options.min_ranks >= 0 && options.min_ranks <= options.ranks,
          concat("at least ", options.min_ranks, " of ", options.ranks, " ranks"), "use at most the number of ranks");
  require(options.spares >= 0, concat(options.spares, " spare processes"), "use 0 or more");
}

// One launch: run() starts the ranks and returns when every one has ended. Destroyed, it has left no process behind.
class Job {
 public:
  Job(const LaunchOptions& options, const ProcessOptions& what, Sinks& sinks)
      : options_(options),
        keeper_(make_keeper()),
        ranks_(options_, what, signals_, keeper_.get(), sinks),
        stopping_(options_, ranks_),
        generations_(options_, ranks_, keeper_.get()) {}

  LaunchResult run() {
    for (LocalRank& rank : ranks_) ranks_.start(rank);
    while (!has_ended_everywhere()) wait_for_events();
    ranks_.end_what_they_left();
    return result();
  }

 private:
  std::unique_ptr<Keeper> make_keeper() {
    if (options_.max_restarts == 0 && options_.min_ranks == 0) return {};
    const auto on_met = [this](int seat, int generation) {
      generations_.on_met(seat, generation);
      if (!stopping_.has_begun()) ranks_.start_spares();
    };
    const auto on_next = [this](int seat, int generation) { generations_.on_next(seat, generation); };
    return std::make_unique<Keeper>(on_met, on_next);
  }

  bool has_ended_everywhere() const {
    if (!ranks_.all_have_ended()) return false;
    if (!options_.machines) return true;
    return stopping_.has_begun() ? stopping_.others_know() : options_.machines->all_done();
  }

  void wait_for_events() {
    std::vector<LocalRank*> ended;
    std::vector<Event> events = {{signals_.fd(), POLLIN, [this] { stopping_.on_signal(signals_.next()); }}};
    if (keeper_) keeper_->add_events(events);
    if (options_.machines) std::ranges::move(options_.machines->events(), std::back_inserter(events));
    ranks_.add_events(events, ended);
    poll_events(events, milliseconds_to_wait());
    on_ended(ended);
    if (options_.machines) follow_machines();
    if (!stopping_.has_begun()) generations_.decide_without_a_loss();
    stopping_.kill_when_due();
    if (!stopping_.has_begun() && ranks_.kill_the_one_that_hangs() && options_.hang.then == OnHang::kEnd)
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
    if (options_.machines) at_most(Machines::longest_wait());
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
    if (options_.workers_may_fail && servers_have_ended()) stopping_.give_the_grace_period();
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
    return may_go_on_ && !stopping_.was_signalled() && end.exit_code != kUsageError;
  }

  // The job continues without `rank`: other workers are running, or have succeeded.
  bool can_do_without(const LocalRank& rank) const {
    if (!options_.workers_may_fail || !may_go_on_ || ranks_.is_server(rank)) return false;
    return std::any_of(ranks_.begin() + options_.servers, ranks_.end(),
                       [](const LocalRank& other) { return !other.end || !other.end->failed(); });
  }

  bool servers_have_ended() const {
    return options_.servers > 0 && std::all_of(ranks_.begin(), ranks_.begin() + options_.servers,
                                               [](const LocalRank& server) { return server.end.has_value(); });
  }

  void on_failed(const LocalRank& rank) {
    if (options_.machines)
      options_.machines->end_job(
          concat("rank ", rank.rank, " on ", options_.machines->me().host(), " ", how_it_ended(*rank.end)));
    failed_ = &rank;
    stopping_.after_failure();
  }

  void follow_machines() {
    Machines& machines = *options_.machines;
    machines.work();
    for (const std::string& words : machines.take_words()) log_warning(words);
    if (stopping_.has_begun()) return;
    if ((lost_ = machines.end())) return stopping_.kill();
    generations_.follow_epochs();
    const auto is_done = [this](const LocalRank& rank) {
      return rank.end && (!rank.end->failed() || stopping_.is_stop(*rank.end));
    };
    if (std::ranges::all_of(ranks_, is_done)) machines.finish();
  }

  // When every rank has ended.
  LaunchResult result() const {
    LaunchResult result{.restarts = generations_.restarts(), .exit_code = 0};
    const auto has_stopped = [this](const LocalRank& rank) { return stopping_.is_stop(*rank.end); };
    if (lost_) {
      result.exit_code = 1;
      result.lost = lost_;
    } else if (failed_ != nullptr) {
      result.failure = RankFailure{.rank = failed_->rank,
                                   .pid = failed_->process->pid(),
                                   .exit_code = failed_->end->exit_code,
                                   .signal = failed_->end->signal,
                                   .hang = failed_->hang,
                                   .last_lines = ranks_.last_lines(*failed_)};
      result.exit_code = failed_->end->signal != 0 ? kSignalBase + failed_->end->signal : failed_->end->exit_code;
    } else if (stopping_.caught_signal() != 0) {
      const bool all_have_stopped = options_.stop_code && std::ranges::all_of(ranks_, has_stopped);
      result.exit_code = all_have_stopped ? *options_.stop_code : kSignalBase + stopping_.caught_signal();
    } else if (has_stopped_) {
      result.exit_code = options_.stop_code.value_or(kSignalBase + SIGTERM);
    }
    return result;
  }

  const LaunchOptions options_;
  const SignalReader signals_{options_.stop_signals};
  std::unique_ptr<Keeper> keeper_;  // while lost ranks may be replaced
  LocalRanks ranks_;
  Stopping stopping_;
  Generations generations_;
  bool may_go_on_ = true;              // after a loss
  bool has_stopped_ = false;           // a rank, because it was asked to
  const LocalRank* failed_ = nullptr;  // the first; none is started after it
  std::optional<std::string> lost_{};  // why this machine can't go on without others
};

LaunchResult launch(const LaunchOptions& options, const ProcessOptions& what) {
  check(options);
  raise_descriptor_limit();
  Sinks sinks;
  const LaunchResult result = Job(options, what, sinks).run();  // the job is gone before the rest
  sinks.out.flush();  // blocks if the reader has stopped, but signals are back to normal
  sinks.err.flush();
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

LaunchResult launch(const LaunchOptions& options, const std::vector<std::string>& command) {
  if (command.empty()) throw UsageError({.what = "no program to start", .next = "name one, with its arguments"});
  return launch(options, ProcessOptions{.command = command});
}

LaunchResult launch(const LaunchOptions& options, const std::function<int()>& body) {
  return launch(options, ProcessOptions{.body = body});
}

std::string describe(const RankFailure& failure, const LaunchOptions& options) {
  const std::string how = how_it_ended({.exit_code = failure.exit_code, .signal = failure.signal});
  const bool hung = !failure.hang.empty();
  const Error error(
      "RankFailed",
      {.what = hung ? concat(failure.hang, ", and was killed") : concat("rank ", failure.rank, " ", how),
       .here = concat("rank ", failure.rank, " of ", place_of(options).world_size, ", pid ", failure.pid),
       .likely = hung ? "an endless loop, a deadlock, a stopped process, or a disk or device that does not answer"
                      : likely_cause(failure.signal),
       .next = hung                       ? "read its stack above; if it only needs longer, raise --hang-timeout"
               : !options.log_dir.empty() ? "read " + log_path(options, failure.rank, ".err")
                                          : "look at its output above"});
  std::string text = error.what();
  if (!failure.last_lines.empty())
    text += concat("\n  last lines of its stderr:\n    ", join(failure.last_lines, "\n    "));
  return text;
}

}  // namespace lockstep
