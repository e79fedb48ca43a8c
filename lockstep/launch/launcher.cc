// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/launcher.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/log.h"
#include "lockstep/base/port.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/launch/environment.h"
#include "lockstep/launch/events.h"
#include "lockstep/launch/hang_watch.h"
#include "lockstep/launch/job_page.h"
#include "lockstep/launch/keeper.h"
#include "lockstep/launch/machines.h"
#include "lockstep/launch/output.h"
#include "lockstep/launch/process.h"
#include "lockstep/launch/spares.h"

namespace lockstep {
namespace {

constexpr int kSignalBase = 128;  // a shell's exit code for a signal
constexpr int kStopped = kSignalBase + SIGTERM;
constexpr std::chrono::milliseconds kLeavesWithin{500};  // a rank whose peers are gone

void check(const LaunchOptions& options) {
  const auto require = [](bool holds, const std::string& what, const std::string& next) {
    if (!holds) throw UsageError({.what = what, .next = next});
  };
  require(options.ranks >= 1, concat(options.ranks, " ranks on a machine make no job"), "start at least 1");
  require(options.servers >= 0 && (options.servers == 0 || options.servers < options.ranks),
          concat(options.servers, " servers among ", options.ranks, " ranks"),
          "leave at least one rank to be a worker");
  require(options.nodes >= 1, concat(options.nodes, " machines make no job"), "use at least 1");
  require(options.node_rank >= 0 && options.node_rank < options.nodes,
          concat("there is no machine ", options.node_rank, " among ", options.nodes), "count machines from 0");
  require(options.master_port >= 0 && options.master_port <= 65535, concat("there is no port ", options.master_port),
          "choose one from 1 to 65535, or 0 for any");
  require(options.nodes == 1 || options.master_port != 0, "several machines need a port they agree on",
          "choose a free port of the machine of rank 0 and give it to every machine");
  require(options.threads_per_rank >= 0, concat(options.threads_per_rank, " threads per rank can't compute"),
          "use at least 1, or 0 for an even share of the cores");
  require(options.max_restarts >= 0, concat(options.max_restarts, " restarts can't be counted"), "use 0 or more");
  require(options.min_ranks >= 0 && options.min_ranks <= options.ranks,
          concat("at least ", options.min_ranks, " of ", options.ranks, " ranks"),
          "use a number of ranks that are there");
  require(options.spares >= 0, concat(options.spares, " spare processes can't wait"), "use 0 or more");
  require(options.output != RankOutput::kSplit || !options.log_dir.empty(), "output in files needs a folder for them",
          "name a log folder");
}

int world_size_of(const LaunchOptions& options) { return options.world_size.value_or(options.nodes * options.ranks); }

std::string log_path(const LaunchOptions& options, int rank, const std::string& suffix) {
  return std::filesystem::path(options.log_dir) / concat("rank", rank, suffix);
}

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw SystemError({.what = concat("can't make the folder ", path, ": ", error.message()), .here = path});
}

std::string how_it_ended(const ExitStatus& end) {
  if (end.signal != 0) return concat("was ended by signal ", end.signal, " (", ::strsignal(end.signal), ")");
  return concat("exited with code ", end.exit_code);
}

struct Rank {
  int rank;  // in the job, of generation 0
  RankStream output;
  RankStream error;
  std::optional<Process> process{};
  std::optional<ExitStatus> end{};
  int generation = 0;    // to which it belongs
  bool has_met = false;  // the others of that generation
  bool waits = false;    // for the next one
  bool is_gone = false;  // lost, and not replaced
  std::string hang{};    // why this process was killed
};

struct Sinks {
  Sink out{STDOUT_FILENO};
  Sink err{STDERR_FILENO};
};

// One launch: run() starts the ranks and returns when every one has ended. Destroyed, it has left no process behind.
class Job {
 public:
  Job(const LaunchOptions& options, Sinks& sinks)
      : options_(options),
        guardian_(options.ranks + options.spares),
        sinks_(sinks),
        page_(make_page()),
        watch_(page_ ? &*page_ : nullptr, options.hang, sinks.err) {
    if (options_.master_port == 0) options_.master_port = port_.emplace().number();
    if (options_.output == RankOutput::kSplit) make_folder(options_.log_dir);
    if (options_.max_restarts > 0 || options_.min_ranks > 0)
      keeper_.emplace(Keeper::Callbacks{.on_met = [this](int seat, int generation) { on_met(seat, generation); },
                                        .on_next = [this](int seat, int generation) { on_next(seat, generation); }});
    const bool first_only = options_.output == RankOutput::kFirst;
    for (int local = 0; local < options_.ranks; ++local) {
      const int rank = first_rank() + local;
      const std::string prefix = concat("[rank ", rank, "] ");
      const bool other = first_only && rank != 0;
      ranks_.push_back({.rank = rank,
                        .output = {first_only && !other ? "" : prefix, other ? sinks_.err : sinks_.out},
                        .error = {prefix, sinks_.err}});
    }
  }

  LaunchResult run(const ProcessOptions& what) {
    what_ = what;
    if (keeper_) spares_.emplace(what.command, groups_of_spares());
    if (options_.machines) number_by(options_.machines->epoch());
    for (int local = 0; local < options_.ranks; ++local) start_rank(local);
    while (!has_ended_everywhere()) wait_for_events();
    end_what_ranks_left();
    if (lost_) return {.restarts = restarts_, .exit_code = 1, .lost = lost_};
    if (!failure_ && caught_signal_ != 0)
      return {.restarts = restarts_,
              .exit_code = all_have_stopped() ? *options_.stop_code : kSignalBase + caught_signal_};
    if (!failure_) return {.restarts = restarts_, .exit_code = stopped_ ? options_.stop_code.value_or(kStopped) : 0};
    failure_->last_lines = last_lines();
    return {.restarts = restarts_,
            .exit_code = failure_->signal != 0 ? kSignalBase + failure_->signal : failure_->exit_code,
            .failure = failure_};
  }

 private:
  static bool has_ended(const Rank& rank) { return rank.end.has_value(); }
  static bool is_gone(const Rank& rank) { return rank.is_gone; }

  void start_rank(int local) {
    Rank& rank = ranks_[local];
    rank.generation = generation_;
    rank.has_met = rank.waits = false;
    rank.hang.clear();
    if (page_) page_->begin(local, rank.rank, generation_);
    ProcessOptions what = what_;
    what.variables = variables(local);
    if (options_.pin && cores_are_ours() && !is_server(local))
      what.cores = cores_of_rank(cores_, local - options_.servers, workers());
    what.signal_mask = signals_.mask_before();
    what.group = guardian_.group(local);
    const UniqueFd output = open_output(rank.rank, rank.output, ".out");
    const UniqueFd error = open_output(rank.rank, rank.error, ".err");
    what.output_fd = output.get();
    what.error_fd = error.get();
    what.close_in_child = descriptors();
    what.close_in_child.insert(what.close_in_child.end(), {output.get(), error.get()});
    std::optional<Process> spare = spares_ ? spares_->take(what) : std::nullopt;
    spare ? rank.process.emplace(std::move(*spare)) : rank.process.emplace(what);
  }

  std::vector<std::atomic<pid_t>*> groups_of_spares() {
    std::vector<std::atomic<pid_t>*> groups;
    for (int spare = 0; spare < options_.spares; ++spare) groups.push_back(guardian_.group(options_.ranks + spare));
    return groups;
  }

  // While the ranks meet they need the cores.
  void start_spares() {
    const auto has_met = [](const Rank& rank) { return rank.has_met || rank.is_gone; };
    if (!spares_ || stopping_ || !std::ranges::all_of(ranks_, has_met)) return;
    ProcessOptions what;
    what.variables = variables(0);
    std::erase_if(what.variables, [](const auto& variable) { return variable.first != "OMP_NUM_THREADS"; });
    what.signal_mask = signals_.mask_before();
    spares_->start(what);
  }

  // Ranks that are gone have left no gap in the numbers.
  Variables variables(int seat) const {
    const int gone = static_cast<int>(std::ranges::count_if(ranks_, &Rank::is_gone));
    const int before = static_cast<int>(std::count_if(ranks_.begin(), ranks_.begin() + seat, &is_gone));
    Variables result = {
        {"RANK", concat(ranks_[seat].rank - before)},  {"WORLD_SIZE", concat(world_size_of(options_) - gone)},
        {"LOCAL_RANK", concat(seat - before)},         {"LOCAL_WORLD_SIZE", concat(options_.ranks - gone)},
        {"GROUP_RANK", concat(options_.node_rank)},    {"MASTER_ADDR", options_.master_addr},
        {"MASTER_PORT", concat(options_.master_port)},
    };
    result.emplace_back("LOCKSTEP_JOB", name_of_job());
    result.emplace_back("LOCKSTEP_PAGE", page_ ? page_->address(seat) : "");
    result.emplace_back("LOCKSTEP_KEEPER", keeper_ ? keeper_->address(seat) : "");
    if (keeper_) {
      result.emplace_back("TORCHELASTIC_RESTART_COUNT", concat(generation_));
      result.emplace_back("TORCHELASTIC_MAX_RESTARTS", concat(options_.max_restarts));
    }
    if (options_.servers > 0) result.emplace_back("LOCKSTEP_LOCAL_SERVERS", concat(options_.servers));
    const int share = std::max(1, allotted_ / workers());
    if (options_.threads_per_rank > 0 || std::getenv("OMP_NUM_THREADS") == nullptr)
      result.emplace_back("OMP_NUM_THREADS", concat(options_.threads_per_rank > 0 ? options_.threads_per_rank : share));
    return result;
  }

  // On several machines that stay connected, ranks of an earlier epoch are another job.
  std::string name_of_job() const {
    if (options_.nodes == 1) return concat("launcher ", ::getpid(), "-", start_time_of(::getpid()));
    return options_.machines ? concat("generation ", generation_, " of ", options_.machines->job()) : "";
  }

  // Without one, ranks publish nothing and are not watched.
  std::optional<JobPage> make_page() const try {
    JobPageHeader header{
        .launcher = ::getpid(),
        .ranks = options_.ranks,
        .world_size = world_size_of(options_),
        .nodes = options_.nodes,
        .node_rank = options_.node_rank,
        .started_at = std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1)};
    const std::string job =
        options_.nodes == 1 ? name_of_job() : concat(options_.master_addr, ":", options_.master_port);
    job.copy(header.job.data(), header.job.size() - 1);
    return JobPage(header);
  } catch (const SystemError&) {
    return {};
  }

  // A quota of CPU time is no set of cores: others, with theirs, would be pinned to the same ones.
  bool cores_are_ours() const { return allotted_ == static_cast<int>(cores_.size()); }

  int first_rank() const { return options_.first_rank.value_or(options_.node_rank * options_.ranks); }
  bool is_server(int local) const { return local < options_.servers; }
  int workers() const { return options_.ranks - options_.servers; }

  // The job continues without `rank`: other workers are running, or have succeeded.
  bool can_do_without(const Rank& rank) const {
    if (!options_.workers_may_fail || !may_go_on_ || is_server(rank.rank - first_rank())) return false;
    return std::any_of(ranks_.begin() + options_.servers, ranks_.end(),
                       [](const Rank& other) { return !other.end || !other.end->failed(); });
  }

  // Nothing where the rank keeps this process's own stderr.
  UniqueFd open_output(int rank, RankStream& stream, const std::string& suffix) const {
    if (options_.output == RankOutput::kFirst && rank == 0 && suffix == ".err") return {};
    if (options_.output != RankOutput::kSplit) return stream.open();
    const std::string path = log_path(options_, rank, suffix);
    const int start = generation_ == 0 ? O_TRUNC : 0;  // a replacement adds to what the rank before it wrote
    UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | start | O_APPEND | O_CLOEXEC, 0644));
    if (!fd) throw system_error("write", path);
    return fd;
  }

  // Descriptors that a forked child must close.
  std::vector<int> descriptors() const {
    std::vector<int> fds = {signals_.fd()};
    if (port_) fds.push_back(port_->fd());
    if (keeper_) std::ranges::copy(keeper_->descriptors(), std::back_inserter(fds));
    if (options_.machines) std::ranges::copy(options_.machines->descriptors(), std::back_inserter(fds));
    if (page_) fds.push_back(page_->fd());
    std::ranges::copy(watch_.descriptors(), std::back_inserter(fds));
    if (spares_) std::ranges::copy(spares_->descriptors(), std::back_inserter(fds));
    for (const Sink* sink : {&sinks_.out, &sinks_.err})
      if (sink->fd() > STDERR_FILENO) fds.push_back(sink->fd());
    for (const Rank& rank : ranks_) {
      fds.insert(fds.end(), {rank.output.fd(), rank.error.fd()});
      if (rank.process) fds.push_back(rank.process->pidfd());
    }
    return fds;
  }

  void wait_for_events() {
    std::vector<Event> events = {{signals_.fd(), POLLIN, [this] { on_signal(); }}};
    if (keeper_) keeper_->add_events(events);
    if (options_.machines) std::ranges::move(options_.machines->events(), std::back_inserter(events));
    std::vector<Rank*> ended;
    for (Rank& rank : ranks_) {
      if (!rank.end)
        events.push_back({rank.process->pidfd(), POLLIN, [&ended, &rank] {
                            if ((rank.end = rank.process->status())) ended.push_back(&rank);
                          }});
      for (RankStream* stream : {&rank.output, &rank.error})
        if (can_read(*stream)) events.push_back({stream->fd(), POLLIN, [stream] { stream->read_some(); }});
    }
    for (Sink* sink : {&sinks_.out, &sinks_.err})
      if (!sink->empty()) events.push_back({sink->fd(), POLLOUT, [sink] { sink->write_some(); }});
    watch_.add_events(events);
    const int longest = options_.machines ? static_cast<int>(Machines::longest_wait().count()) : -1;
    const int wait = milliseconds_to_wait();
    poll_events(events, longest < 0 || (wait >= 0 && wait < longest) ? wait : longest);
    on_ended(ended);
    if (options_.machines) follow_machines();
    decide_without_a_loss();
    if (kill_at_ && kill_at_->passed()) kill_all();
    if (!stopping_) look_for_hang();
  }

  // While the job runs, the end of each rank, every signal and all output wake this process, and the time to look whether
  // ranks hang. Ranks that wait for a word about others, none of which has ended, have the grace period. Once the ranks
  // are told to stop, the grace period is the deadline; after SIGKILL only the kernel is
  // waited for.
  int milliseconds_to_wait() const {
    const auto next = stopping_ ? std::optional<std::chrono::milliseconds>() : watch_.next_look();
    if (kill_at_) return static_cast<int>(kill_at_->left().count());
    if (decide_at_ && (!next || decide_at_->left() < *next)) return static_cast<int>(decide_at_->left().count());
    return next ? static_cast<int>(next->count()) : -1;
  }

  void look_for_hang() {
    std::vector<LivingRank> living;
    for (int local = 0; local < options_.ranks; ++local)
      if (!ranks_[local].end) living.push_back({local, ranks_[local].rank, ranks_[local].process->pid()});
    const std::optional<Hang> hang = watch_.look(living, descriptors());
    if (!hang || ranks_[hang->local].end) return;
    sinks_.err.add_line("lockstep: ", concat("rank ", hang->rank, " is killed"));
    ranks_[hang->local].hang = hang->what;
    may_go_on_ = options_.hang.then != OnHang::kEnd;
    ranks_[hang->local].process->signal_group(SIGKILL);
  }

  // A reader that has stopped does not stop the ranks, until the disk is full too.
  static bool can_read(const RankStream& stream) { return stream.fd() >= 0 && !stream.sink().full(); }

  void on_signal() {
    const int signal = signals_.next();
    if (signal == 0) return;
    const bool again = signal == SIGINT && (stopping_ || interrupted_);
    if (!again && is_stop_signal(signal)) {
      asked_ = true;
      interrupted_ = interrupted_ || signal == SIGINT;
      return signal_all(signal);
    }
    caught_signal_ = caught_signal_ == 0 ? signal : caught_signal_;
    if (options_.machines) leave();
    if (!again) return stop_all(signal);
    stopping_ = true;
    kill_all();
  }

  bool is_stop_signal(int signal) const {
    return std::ranges::find(options_.stop_signals, signal) != options_.stop_signals.end();
  }

  bool has_stopped(const ExitStatus& end) const {
    if (end.signal != 0) return false;
    return options_.stop_code ? end.exit_code == *options_.stop_code : asked_ && end.exit_code == kStopped;
  }

  // Whatever signal has asked them to.
  bool all_have_stopped() const {
    return options_.stop_code &&
           std::ranges::all_of(ranks_, [this](const Rank& rank) { return has_stopped(*rank.end); });
  }

  // Of ranks found at the same time, one that a signal ended comes first: the others may have failed because of it.
  void on_ended(std::vector<Rank*>& ended) {
    if (keeper_ && !ended.empty()) keeper_->read_all();  // a generation that was complete is, before the next begins
    std::ranges::stable_partition(ended, [](const Rank* rank) { return rank->end->signal != 0; });
    for (Rank* rank : ended) {
      if (!rank->end) continue;
      if (page_) page_->end(seat_of(*rank));
      if (stopping_ || rank->is_gone) continue;
      if (!rank->end->failed()) {
        if (rank->generation < generation_) restart(*rank);  // the others have begun anew, and miss it
        continue;
      }
      if (has_stopped(*rank->end))
        stopped_ = true;
      else if (can_do_without(*rank))
        log_warning(concat("rank ", rank->rank, " ", how_it_ended(*rank->end), "; the job goes on without it"));
      else if (can_replace(*rank))
        replace(*rank);
      else if (can_shrink())
        go_on_without(*rank);
      else
        on_failed(*rank);
    }
    // Once the servers have ended, the workers have little left to do; one that hangs is killed.
    if (options_.workers_may_fail && servers_ended()) give_the_grace_period();
  }

  // ---- Replacing ranks

  bool can_go_on() const { return keeper_ && may_go_on_ && !asked_ && caught_signal_ == 0; }

  // One that belongs to an earlier generation has been lost with it.
  bool can_replace(const Rank& rank) const {
    if (options_.machines && options_.machines->end()) return false;
    return can_go_on() && (restarts_ < options_.max_restarts || (restarts_ > 0 && rank.generation < generation_));
  }

  bool can_shrink() const {
    const auto left = std::ranges::count_if(ranks_, [](const Rank& rank) { return !rank.end; });
    return can_go_on() && options_.min_ranks > 0 && left >= options_.min_ranks;
  }

  void replace(Rank& rank) {
    if (options_.machines && rank.generation == generation_) return options_.machines->want_restart();
    if (rank.generation == generation_) ++restarts_;
    log_warning(concat("rank ", rank.rank, " ", how_it_ended(*rank.end), "; a new process takes its place (restart ",
                       restarts_, " of ", options_.max_restarts, ")"));
    if (rank.generation == generation_) begin_generation();
    restart(rank);
  }

  void go_on_without(Rank& rank) {
    rank.is_gone = true;
    log_warning(concat("rank ", rank.rank, " ", how_it_ended(*rank.end), "; the job goes on with ",
                       std::ranges::count_if(ranks_, [](const Rank& each) { return !each.end; }), " ranks"));
    begin_generation();
  }

  // Those that are about to meet in the generation before would wait for the rank that is lost. Those that have ended well
  // are missed by the others: started again, they find that all is done.
  void begin_generation() {
    ++generation_;
    decide_at_.reset();
    for (Rank& rank : ranks_) {
      if (rank.is_gone) continue;
      const bool has_failed = rank.end && rank.end->failed();  // see on_ended()
      if (rank.waits && !rank.end)
        admit(rank);
      else if (!has_failed && (rank.end || !rank.has_met))
        restart(rank);
    }
  }

  // Ranks have lost others, but none has ended: they have waited for longer than their timeout. Those that do not answer
  // are killed, and replaced when they have ended.
  void decide_without_a_loss() {
    const auto waits = [](const Rank& rank) { return rank.waits || rank.end; };
    const bool all_wait = !options_.machines && std::ranges::all_of(ranks_, waits);  // else it may be another machine
    if (stopping_ || !decide_at_ || (!all_wait && !decide_at_->passed())) return;
    decide_at_.reset();
    for (const Rank& rank : ranks_) {
      if (waits(rank)) continue;
      log_warning(concat("rank ", rank.rank, " is killed: others have waited for it for longer than their timeout"));
      rank.process->signal_group(SIGKILL);
    }
    if (options_.machines) return options_.machines->want_restart();
    if (!all_wait || restarts_ == options_.max_restarts) return;
    ++restarts_;
    log_warning(
        concat("the ranks have lost each other; they go on (restart ", restarts_, " of ", options_.max_restarts, ")"));
    begin_generation();
  }

  void restart(Rank& rank) {
    if (rank.process) rank.process->signal_group(SIGKILL);
    rank.output.drain();
    rank.error.drain();
    rank.process.reset();
    rank.end.reset();
    const int seat = seat_of(rank);
    keeper_->forget(seat);
    start_rank(seat);
  }

  // ---- Several machines: an epoch of the machines is a generation of the ranks

  bool has_ended_everywhere() const {
    if (!std::ranges::all_of(ranks_, &has_ended)) return false;
    if (!options_.machines) return true;
    return stopping_ ? has_left() : options_.machines->all_done();
  }

  // Others that know that this machine leaves need not wait until they miss it, nor ask who goes on.
  bool has_left() const { return !left_by_ || left_by_->passed() || options_.machines->end(); }

  void follow_machines() {
    Machines& machines = *options_.machines;
    machines.work();
    for (const std::string& words : machines.take_words()) log_warning(words);
    if (stopping_) return;
    if (const auto end = machines.end()) {
      lost_ = end;
      stopping_ = true;
      return kill_all();
    }
    if (const auto epoch = machines.take_news()) go_on_as(*epoch);
    if (leave_by_ && leave_by_->passed()) replace_those_that_stay();
    const auto is_done = [this](const Rank& rank) {
      return rank.end && (!rank.end->failed() || has_stopped(*rank.end));
    };
    if (std::ranges::all_of(ranks_, is_done)) machines.finish();
  }

  void leave() {
    if (!left_by_) left_by_ = Deadline::after(kLeavesWithin);
    options_.machines->want_to_leave();
  }

  void number_by(const Epoch& epoch) {
    const std::string& me = options_.machines->me().id;
    members_ = epoch.members;
    generation_ = epoch.number;
    restarts_ = epoch.restarts;
    options_.nodes = static_cast<int>(epoch.members.size());
    options_.node_rank = epoch.index_of(me);
    options_.first_rank = epoch.first_rank(me);
    options_.world_size = epoch.world_size();
    options_.master_addr = epoch.members.front().address;
    options_.master_port = epoch.master_port();
    for (Rank& rank : ranks_) {
      rank.rank = first_rank() + seat_of(rank);
      if (page_) page_->record(seat_of(rank)).job_rank = rank.rank;
    }
  }

  // Who has lost a peer comes by itself. Where machines have only come, nobody is lost: then the last rank is, on purpose.
  void go_on_as(const Epoch& epoch) {
    const bool is_lost = epoch.restarts != restarts_ || !std::ranges::all_of(members_, [&](const Member& member) {
                           return epoch.has(member.id);
                         });
    const bool has_last = members_.back().id == options_.machines->me().id;
    decide_at_.reset();
    if (keeper_) keeper_->read_all();
    number_by(epoch);
    log_warning(concat("generation ", epoch.number, ": ", options_.nodes, " machines, ", *options_.world_size,
                       " ranks (restart ", restarts_, " of ", options_.max_restarts, "); this one is machine ",
                       options_.node_rank));
    for (Rank& rank : ranks_) {
      const bool is_given_up = !is_lost && has_last && seat_of(rank) == options_.ranks - 1;
      if (rank.waits && !rank.end)
        admit(rank);
      else if (rank.end || !rank.has_met || is_given_up)
        restart(rank);
    }
    leave_by_ = Deadline::after(kLeavesWithin);
  }

  // In a collective with a machine that says nothing any more, or in one that does not need those that are lost.
  void replace_those_that_stay() {
    leave_by_.reset();
    for (Rank& rank : ranks_)
      if (rank.generation < generation_) restart(rank);
  }

  int seat_of(const Rank& rank) const { return static_cast<int>(&rank - &*ranks_.begin()); }

  void admit(Rank& rank) {
    rank.generation = generation_;
    rank.has_met = rank.waits = false;
    const int seat = seat_of(rank);
    if (page_) page_->record(seat).generation = generation_;
    keeper_->tell(seat, generation_, variables(seat));
  }

  void on_met(int seat, int generation) {
    if (seat < 0 || seat >= options_.ranks) return;
    ranks_[seat].has_met = ranks_[seat].has_met || generation == ranks_[seat].generation;
    start_spares();
  }

  // A rank has lost another one. Its end may not be known yet.
  void on_next(int seat, int generation) {
    if (seat < 0 || seat >= options_.ranks || ranks_[seat].end) return;
    ranks_[seat].waits = true;
    if (generation < generation_) return admit(ranks_[seat]);
    if (!decide_at_) decide_at_ = Deadline::after(options_.grace);
  }

  bool servers_ended() const {
    return options_.servers > 0 && std::all_of(ranks_.begin(), ranks_.begin() + options_.servers, &has_ended);
  }

  void give_the_grace_period() {
    if (!stopping_) kill_at_ = Deadline::after(options_.grace);
    stopping_ = true;
  }

  void on_failed(const Rank& rank) {
    if (options_.machines)
      options_.machines->end_job(
          concat("rank ", rank.rank, " on ", options_.machines->me().host(), " ", how_it_ended(*rank.end)));
    failure_ = RankFailure{.rank = rank.rank,
                           .pid = rank.process->pid(),
                           .exit_code = rank.end->exit_code,
                           .signal = rank.end->signal,
                           .hang = rank.hang};
    if (!is_stop_signal(SIGTERM)) return stop_all(SIGTERM);
    stopping_ = true;  // they would only make a note of a SIGTERM, and wait for the failed one in their next step
    kill_all();
  }

  // SIGCONT: a stopped process receives the other signal only when it continues.
  void stop_all(int signal) {
    signal_all(signal);
    signal_all(SIGCONT);
    give_the_grace_period();
  }

  void kill_all() {
    signal_all(SIGKILL);
    kill_at_.reset();
  }

  void signal_all(int signal) const {
    for (const Rank& rank : ranks_) rank.process->signal_group(signal);
  }

  // The ranks are dead but not yet waited for, so their process groups still are theirs.
  void end_what_ranks_left() {
    signal_all(SIGKILL);
    for (Rank& rank : ranks_) {
      rank.output.drain();
      rank.error.drain();
    }
  }

  std::vector<std::string> last_lines() const {
    if (options_.output == RankOutput::kSplit) return last_lines_of_file(log_path(options_, failure_->rank, ".err"));
    const auto& lines = ranks_[failure_->rank - first_rank()].error.last_lines();
    return {lines.begin(), lines.end()};
  }

  LaunchOptions options_;
  ProcessOptions what_;  // every rank runs
  SignalReader signals_{options_.stop_signals};
  Guardian guardian_;
  std::optional<ReservedPort> port_;
  std::optional<Keeper> keeper_;  // while lost ranks may be replaced
  std::optional<Spares> spares_;
  int generation_ = 0;
  bool may_go_on_ = true;  // after a loss
  int restarts_ = 0;
  std::vector<Member> members_{};       // of this generation's epoch, on several machines
  std::optional<Deadline> leave_by_{};  // ranks of the generation before
  std::optional<Deadline> left_by_{};   // this machine, because a signal asked it to
  std::optional<std::string> lost_{};   // why this machine can't go on without others
  CoreSet cores_ = usable_cores();
  int allotted_ = allotted_cores();
  Sinks& sinks_;
  std::optional<JobPage> page_;
  HangWatch watch_;
  IntVector<Rank> ranks_;
  std::optional<RankFailure> failure_;
  int caught_signal_ = 0;              // the first that ended the job
  bool asked_ = false;                 // by a signal: the ranks, to stop
  bool interrupted_ = false;           // by a SIGINT, which asked the ranks to stop
  bool stopped_ = false;               // a rank has stopped because it was asked to
  bool stopping_ = false;              // since the first failure or signal
  std::optional<Deadline> decide_at_;  // what comes next, for ranks that wait although none has ended
  std::optional<Deadline> kill_at_;    // the end of the grace period, until it has come
};

LaunchResult launch(const LaunchOptions& options, const ProcessOptions& what) {
  check(options);
  Sinks sinks;
  const LaunchResult result = Job(options, sinks).run(what);  // the job is gone before the rest
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
       .here = concat("rank ", failure.rank, " of ", world_size_of(options), ", pid ", failure.pid),
       .likely = hung ? "an endless loop, a deadlock, a stopped process, or a disk or device that does not answer"
                      : likely_cause(failure.signal),
       .next = hung ? "read its stack above; if it only needs longer, raise --hang-timeout"
               : options.output == RankOutput::kSplit ? "read " + log_path(options, failure.rank, ".err")
                                                      : "look at its output above"});
  std::string text = error.what();
  if (!failure.last_lines.empty())
    text += concat("\n  last lines of its stderr:\n    ", join(failure.last_lines, "\n    "));
  return text;
}

}  // namespace lockstep
