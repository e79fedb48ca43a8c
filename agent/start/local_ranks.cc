// SPDX-License-Identifier: Apache-2.0
#include "agent/start/local_ranks.h"

#include <fcntl.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>

#include "agent/meet/machines.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw SystemError({.what = concat("can't make the folder ", path, ": ", error.message()), .here = path});
}

bool can_read(const RankStream& stream) { return stream.fd() >= 0 && !stream.sink().full(); }

}  // namespace

PlaceInJob place_of(const LaunchOptions& options) {
  if (options.machines) return place_of(options.machines->epoch(), options.machines->me().id);
  return {.nodes = options.nodes,
          .node_rank = options.node_rank,
          .first_rank = options.node_rank * options.ranks,
          .world_size = options.nodes * options.ranks,
          .master_addr = options.master_addr,
          .master_port = options.master_port};
}

std::string log_path(const LaunchOptions& options, int rank, const std::string& suffix) {
  return std::filesystem::path(options.log_dir) / concat("rank", rank, suffix);
}

LocalRanks::LocalRanks(const LaunchOptions& options, const ProcessOptions& what, const SignalReader& signals,
                       Keeper* keeper, Sinks& sinks)
    : options_(options),
      what_(what),
      signals_(signals),
      keeper_(keeper),
      sinks_(sinks),
      guardian_(options.ranks + options.spares),
      place_(place_of(options)),
      page_(make_page()),
      watch_(page_ ? &*page_ : nullptr, options.hang, sinks.err) {
  if (place_.master_port == 0) place_.master_port = port_.emplace().number();
  if (!options_.log_dir.empty()) make_folder(options_.log_dir);
  if (keeper_ != nullptr) spares_.emplace(what_.command, groups_of_spares());
  for (int seat = 0; seat < options_.ranks; ++seat) {
    const int rank = place_.first_rank + seat;
    const std::string prefix = concat("[rank ", rank, "] ");
    const bool is_plain = options_.first_is_plain && rank == 0;
    ranks_.push_back(
        {.rank = rank,
         .output = {is_plain ? "" : prefix, is_plain || !options_.first_is_plain ? sinks_.out : sinks_.err},
         .error = {prefix, sinks_.err}});
  }
}

// Without one, ranks publish nothing and are not watched.
std::optional<JobPage> LocalRanks::make_page() const try {
  JobPage page({.ranks = options_.ranks, .nodes = place_.nodes});
  page.rename(place_.nodes == 1 ? name_of_job() : concat(place_.master_addr, ":", place_.master_port),
              place_.world_size, place_.node_rank);
  return page;
} catch (const SystemError&) {
  return {};
}

// On several machines that stay connected, ranks of an earlier epoch are another job.
std::string LocalRanks::name_of_job() const {
  if (place_.nodes == 1) return concat("launcher ", ::getpid(), "-", start_time_of(::getpid()));
  return options_.machines ? concat("generation ", generation_, " of ", options_.machines->job()) : "";
}

int LocalRanks::count_alive() const { return static_cast<int>(std::ranges::count_if(ranks_, &LocalRank::is_alive)); }

void LocalRanks::begin_generation(int number, const PlaceInJob& place) {
  generation_ = number;
  place_ = place;
  for (LocalRank& rank : ranks_) {
    rank.rank = place_.first_rank + seat_of(rank);
    if (page_) page_->record(seat_of(rank)).job_rank = rank.rank;
  }
}

// ---- Starting them

void LocalRanks::start(LocalRank& rank) {
  rank.generation = generation_;
  rank.has_met = rank.waits = false;
  rank.hang.clear();
  if (page_) page_->begin(seat_of(rank), rank.rank, generation_);
  const UniqueFd output = open_output(rank.rank, rank.output, ".out");
  const UniqueFd error = open_output(rank.rank, rank.error, ".err");
  ProcessOptions what = process_of(rank);
  what.output_fd = output.get();
  what.error_fd = error.get();
  what.close_in_child.insert(what.close_in_child.end(), {output.get(), error.get()});
  std::optional<Process> spare = spares_ ? spares_->take(what) : std::nullopt;
  spare ? rank.process.emplace(std::move(*spare)) : rank.process.emplace(what);
}

void LocalRanks::restart(LocalRank& rank) {
  if (rank.process) rank.process->signal_group(SIGKILL);
  rank.output.drain();
  rank.error.drain();
  rank.process.reset();
  rank.end.reset();
  keeper_->forget(seat_of(rank));
  start(rank);
}

void LocalRanks::admit(LocalRank& rank) {
  const int seat = seat_of(rank);
  rank.generation = generation_;
  rank.has_met = rank.waits = false;
  if (page_) page_->record(seat).generation = generation_;
  keeper_->tell(seat, generation_, variables(seat));
}

ProcessOptions LocalRanks::process_of(const LocalRank& rank) {
  ProcessOptions what = what_;
  const int seat = seat_of(rank);
  what.variables = variables(seat);
  if (options_.pin && cores_are_ours() && !is_server(rank))
    what.cores = cores_of_rank(cores_, seat - options_.servers, workers());
  what.signal_mask = signals_.mask_before();
  what.group = guardian_.group(seat);
  what.close_in_child = descriptors();
  return what;
}

// Ranks that are gone have left no gap in the numbers.
Variables LocalRanks::variables(int seat) const {
  const int gone = static_cast<int>(std::ranges::count_if(ranks_, &LocalRank::is_gone));
  const auto is_gone = [](const LocalRank& rank) { return rank.is_gone; };
  const int before = static_cast<int>(std::count_if(ranks_.begin(), ranks_.begin() + seat, is_gone));
  Variables result = {
      {"RANK", concat(ranks_[seat].rank - before)},
      {"WORLD_SIZE", concat(place_.world_size - gone)},
      {"LOCAL_RANK", concat(seat - before)},
      {"LOCAL_WORLD_SIZE", concat(options_.ranks - gone)},
      {"GROUP_RANK", concat(place_.node_rank)},
      {"MASTER_ADDR", place_.master_addr},
      {"MASTER_PORT", concat(place_.master_port)},
      {"LOCKSTEP_JOB", name_of_job()},
      {"LOCKSTEP_PAGE", page_ ? page_->address(seat) : ""},
      {"LOCKSTEP_KEEPER", keeper_ != nullptr ? keeper_->address(seat) : ""},
      {"LOCKSTEP_MIN_RANKS", concat(options_.min_ranks)},
  };
  if (keeper_ != nullptr) {
    result.emplace_back("TORCHELASTIC_RESTART_COUNT", concat(generation_));
    result.emplace_back("TORCHELASTIC_MAX_RESTARTS", concat(options_.max_restarts));
  }
  if (options_.servers > 0) result.emplace_back("LOCKSTEP_LOCAL_SERVERS", concat(options_.servers));
  if (std::getenv("OMP_NUM_THREADS") == nullptr)
    result.emplace_back("OMP_NUM_THREADS", concat(std::max(1, allotted_ / workers())));
  return result;
}

// Returns nothing if the rank keeps this process's own stderr.
UniqueFd LocalRanks::open_output(int rank, RankStream& stream, const std::string& suffix) const {
  if (options_.first_is_plain && rank == 0 && suffix == ".err") return {};
  if (options_.log_dir.empty()) return stream.open();
  const std::string path = log_path(options_, rank, suffix);
  const int start = generation_ == 0 ? O_TRUNC : 0;  // a replacement adds to what the rank before it wrote
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | start | O_APPEND | O_CLOEXEC, 0644));
  if (!fd) throw system_error("write", path);
  return fd;
}

std::vector<std::atomic<pid_t>*> LocalRanks::groups_of_spares() {
  std::vector<std::atomic<pid_t>*> groups;
  for (int spare = 0; spare < options_.spares; ++spare) groups.push_back(guardian_.group(options_.ranks + spare));
  return groups;
}

void LocalRanks::start_spares() {
  const auto has_met = [](const LocalRank& rank) { return rank.has_met || rank.is_gone; };
  if (!spares_ || !std::ranges::all_of(ranks_, has_met)) return;
  ProcessOptions what;
  what.variables = variables(0);
  std::erase_if(what.variables, [](const auto& variable) { return variable.first != "OMP_NUM_THREADS"; });
  what.signal_mask = signals_.mask_before();
  spares_->start(what);
}

// Descriptors that a forked child must close.
std::vector<int> LocalRanks::descriptors() const {
  std::vector<int> fds = {signals_.fd()};
  if (port_) fds.push_back(port_->fd());
  if (keeper_ != nullptr) std::ranges::copy(keeper_->descriptors(), std::back_inserter(fds));
  if (options_.machines) std::ranges::copy(options_.machines->descriptors(), std::back_inserter(fds));
  if (page_) fds.push_back(page_->fd());
  std::ranges::copy(watch_.descriptors(), std::back_inserter(fds));
  if (spares_) std::ranges::copy(spares_->descriptors(), std::back_inserter(fds));
  for (const Sink* sink : {&sinks_.out, &sinks_.err})
    if (sink->fd() > STDERR_FILENO) fds.push_back(sink->fd());
  for (const LocalRank& rank : ranks_) {
    fds.insert(fds.end(), {rank.output.fd(), rank.error.fd()});
    if (rank.process) fds.push_back(rank.process->pidfd());
  }
  return fds;
}

// ---- While they run

void LocalRanks::add_events(std::vector<Event>& events, std::vector<LocalRank*>& ended) {
  for (LocalRank& rank : ranks_) {
    const auto see_end = [this, &ended, &rank] {
      rank.end = rank.process->status();
      if (!rank.end) return;
      if (page_) page_->end(seat_of(rank));
      ended.push_back(&rank);
    };
    if (rank.is_alive()) events.push_back({rank.process->pidfd(), POLLIN, see_end});
    for (RankStream* stream : {&rank.output, &rank.error})
      if (can_read(*stream)) events.push_back({stream->fd(), POLLIN, [stream] { stream->read_some(); }});
  }
  for (Sink* sink : {&sinks_.out, &sinks_.err})
    if (!sink->empty()) events.push_back({sink->fd(), POLLOUT, [sink] { sink->write_some(); }});
  watch_.add_events(events);
}

bool LocalRanks::kill_the_one_that_hangs() {
  std::vector<LivingRank> living;
  for (const LocalRank& rank : ranks_)
    if (rank.is_alive()) living.push_back({seat_of(rank), rank.rank, rank.process->pid()});
  const std::optional<Hang> hang = watch_.look(living, descriptors());
  if (!hang || !ranks_[hang->local].is_alive()) return false;
  sinks_.err.add_line("lockstep: ", concat("rank ", hang->rank, " is killed"));
  ranks_[hang->local].hang = hang->what;
  ranks_[hang->local].process->signal_group(SIGKILL);
  return true;
}

void LocalRanks::signal_all(int signal) const {
  for (const LocalRank& rank : ranks_) rank.process->signal_group(signal);
}

// The ranks are dead but not yet waited for, so their process groups still are theirs.
void LocalRanks::end_what_they_left() {
  signal_all(SIGKILL);
  for (LocalRank& rank : ranks_) {
    rank.output.drain();
    rank.error.drain();
  }
}

std::vector<std::string> LocalRanks::last_lines(const LocalRank& rank) const {
  if (!options_.log_dir.empty()) return last_lines_of_file(log_path(options_, rank.rank, ".err"));
  return {rank.error.last_lines().begin(), rank.error.last_lines().end()};
}

}  // namespace lockstep
