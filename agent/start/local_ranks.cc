// SPDX-License-Identifier: Apache-2.0
#include "agent/start/local_ranks.h"

#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "agent/meet/machines.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// A quota of CPU time is no set of cores: others, with theirs, would be pinned to the same ones.
CoreSet own_cores() {
  CoreSet cores = usable_cores();
  return allotted_cores() == std::ssize(cores) ? cores : CoreSet();
}

}  // namespace

PlaceInJob place_of(const PlaceOptions& place, int ranks) {
  if (place.machines) return place_of(place.machines->epoch(), place.machines->me().id);
  return {.nodes = place.nodes,
          .node_rank = place.node_rank,
          .first_rank = place.node_rank * ranks,
          .world_size = place.nodes * ranks,
          .master_addr = place.master_addr.empty() ? "127.0.0.1" : place.master_addr,
          .master_port = place.master_port};
}

LocalRanks::LocalRanks(const StartOptions& options, const PlaceOptions& place, const HangOptions& hang,
                       ProcessOptions what, const SignalReader& signals, Keeper* keeper, Sinks& sinks)
    : options_(options),
      machines_(place.machines.get()),
      what_(std::move(what)),
      keeper_(keeper),
      sinks_(sinks),
      guardian_(options.ranks + 1),
      place_(place_of(place, options.ranks)),
      cores_(options.pin ? own_cores() : CoreSet()),
      page_(make_page()),
      watch_(page_ ? &*page_ : nullptr, hang, sinks.err) {
  what_.signal_mask = signals.mask_before();
  if (place_.master_port == 0) place_.master_port = port_.emplace().number();
  if (!options_.log_dir.empty()) make_folder(options_.log_dir);
  if (keeper_ != nullptr) spare_.emplace(what_, guardian_.group(options_.ranks));
  for (int seat = 0; seat < options_.ranks; ++seat) {
    const int rank = place_.first_rank + seat;
    const std::string prefix = concat("[rank ", rank, "] ");
    const bool is_plain = options_.first_is_plain && rank == 0;
    ranks_.push_back({.seat = seat,
                      .rank = rank,
                      .output = {is_plain ? "" : prefix, is_plain || !options_.first_is_plain ? sinks.out : sinks.err},
                      .error = {prefix, sinks.err}});
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
  return machines_ != nullptr ? concat("generation ", generation_, " of ", machines_->job()) : "";
}

int LocalRanks::count_alive() const { return static_cast<int>(std::ranges::count_if(ranks_, &LocalRank::is_alive)); }

void LocalRanks::begin_generation(int number, const PlaceInJob& place) {
  generation_ = number;
  place_ = place;
  for (LocalRank& rank : ranks_) {
    rank.rank = place_.first_rank + rank.seat;
    if (page_) page_->record(rank.seat).job_rank = rank.rank;
  }
}

// ---- Starting them

void LocalRanks::start(LocalRank& rank) {
  rank.generation = generation_;
  rank.has_met = rank.waits = false;
  rank.hang.clear();
  if (page_) page_->begin(rank.seat, rank.rank, generation_);
  const UniqueFd output = open_output(rank, rank.output, ".out");
  const UniqueFd error = open_output(rank, rank.error, ".err");
  ProcessOptions what = process_of(rank);
  what.output_fd = output.get();
  what.error_fd = error.get();
  std::optional<Process> spare = spare_ ? spare_->take(what) : std::nullopt;
  spare ? rank.process.emplace(std::move(*spare)) : rank.process.emplace(what);
}

void LocalRanks::restart(LocalRank& rank) {
  if (rank.process) rank.process->signal_group(SIGKILL);
  rank.output.drain();
  rank.error.drain();
  rank.process.reset();
  rank.end.reset();
  keeper_->forget(rank.seat);
  start(rank);
}

void LocalRanks::admit(LocalRank& rank) {
  rank.generation = generation_;
  rank.has_met = rank.waits = false;
  if (page_) page_->record(rank.seat).generation = generation_;
  keeper_->tell(rank.seat, generation_, variables(rank.seat));
}

ProcessOptions LocalRanks::process_of(const LocalRank& rank) {
  ProcessOptions what = what_;
  std::ranges::move(variables(rank.seat), std::back_inserter(what.variables));
  if (!cores_.empty() && !is_server(rank))
    what.cores = cores_of_rank(cores_, rank.seat - options_.servers, options_.ranks - options_.servers);
  what.group = guardian_.group(rank.seat);
  return what;
}

// The variables that may change with each generation. Ranks that are gone have left no gap in the numbers.
Variables LocalRanks::variables(int seat) const {
  const auto gone_before = [this](int end) {
    const auto is_gone = [end](const LocalRank& rank) { return rank.is_gone && rank.seat < end; };
    return static_cast<int>(std::ranges::count_if(ranks_, is_gone));
  };
  const int before = gone_before(seat), gone = gone_before(options_.ranks);
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
  };
  if (keeper_ != nullptr) result.emplace_back("TORCHELASTIC_RESTART_COUNT", concat(generation_));
  return result;
}

std::string LocalRanks::log_of(const LocalRank& rank, const char* suffix) const {
  return options_.log_dir.empty() ? "" : std::filesystem::path(options_.log_dir) / concat("rank", rank.rank, suffix);
}

// Returns nothing if the rank keeps this process's own stderr.
UniqueFd LocalRanks::open_output(const LocalRank& rank, RankStream& stream, const char* suffix) const {
  if (options_.first_is_plain && rank.rank == 0 && &stream == &rank.error) return {};
  const std::string path = log_of(rank, suffix);
  if (path.empty()) return stream.open();
  const int start = generation_ == 0 ? O_TRUNC : 0;  // a replacement adds to what the rank before it wrote
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | start | O_APPEND | O_CLOEXEC, 0644));
  if (!fd) throw system_error("write", path);
  return fd;
}

// A job that runs does not end because it has no room for one more process.
void LocalRanks::start_spare() try {
  const auto has_met = [](const LocalRank& rank) { return rank.has_met || rank.is_gone; };
  if (spare_ && std::ranges::all_of(ranks_, has_met)) spare_->start();
} catch (const SystemError& error) {
  log_info(concat("no spare process for a lost rank: ", error.text().what));
  spare_.reset();
}

// ---- While they run

void LocalRanks::add_events(std::vector<Event>& events, std::vector<LocalRank*>& ended) {
  for (LocalRank& rank : ranks_) {
    const auto see_end = [this, &ended, &rank] {
      rank.end = rank.process->status();
      if (!rank.end) return;
      rank.waits = false;
      if (page_) page_->end(rank.seat);
      ended.push_back(&rank);
    };
    if (rank.is_alive()) events.push_back({rank.process->pidfd(), POLLIN, see_end});
    rank.output.add_events(events);
    rank.error.add_events(events);
  }
  sinks_.add_events(events);
  watch_.add_events(events);
}

bool LocalRanks::kill_the_one_that_hangs() {
  std::vector<LivingRank> living;
  for (const LocalRank& rank : ranks_)
    if (rank.is_alive()) living.push_back({rank.seat, rank.rank, rank.process->pid()});
  const std::optional<Hang> hang = watch_.look(living);
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

RankFailure LocalRanks::failure_of(const LocalRank& rank) const {
  const std::string log = log_of(rank, ".err");
  const auto& lines = rank.error.last_lines();
  return {.rank = rank.rank,
          .world_size = place_.world_size,
          .pid = rank.process->pid(),
          .end = *rank.end,
          .hang = rank.hang,
          .log = log,
          .last_lines = log.empty() ? std::vector(lines.begin(), lines.end()) : last_lines_of_file(log)};
}

}  // namespace lockstep
