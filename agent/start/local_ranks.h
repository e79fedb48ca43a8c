// SPDX-License-Identifier: Apache-2.0
// agent/start/local_ranks.h: the ranks of this machine: their processes, what each of them gets, and what they print.
//
// Flow:    launcher.cc, and generations.h after a loss -> here -> one process per rank, or a spare that becomes one
// Owns:    the processes, until it is destroyed; the page on which ranks publish what they do; a spare; pipes
// Threads: the launcher's only one
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "agent/clusters/environment.h"
#include "agent/recover/keeper.h"
#include "agent/start/launcher.h"
#include "agent/start/output.h"
#include "agent/start/spare.h"
#include "agent/watch/hang_watch.h"
#include "lockstep/base/int_vector.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/cores.h"
#include "lockstep/observe/job_page.h"

namespace lockstep {

struct LocalRank {
  int seat;  // on this machine, for as long as the job runs
  int rank;  // in the job, before ranks of this machine are gone
  RankStream output;
  RankStream error;
  std::optional<Process> process{};
  std::optional<ExitStatus> end{};
  int generation = 0;    // to which it belongs
  bool has_met = false;  // the others of that generation
  bool waits = false;    // for the next one
  bool is_gone = false;  // lost, and not replaced
  std::string hang{};    // why this process was killed

  bool is_alive() const { return !end; }
};

class LocalRanks {
 public:
  // Starts none yet. what: every rank runs, with the variables that all have alike. keeper: null where lost ranks are not replaced.
  LocalRanks(const StartOptions& options, const PlaceOptions& place, const HangOptions& hang, ProcessOptions what,
             const SignalReader& signals, Keeper* keeper, Sinks& sinks);

  auto begin() { return ranks_.begin(); }
  auto end() { return ranks_.end(); }
  auto begin() const { return ranks_.begin(); }
  auto end() const { return ranks_.end(); }
  LocalRank* find(int seat) { return seat >= 0 && seat < ranks_.size() ? &ranks_[seat] : nullptr; }
  bool is_server(const LocalRank& rank) const { return rank.seat < options_.servers; }
  int count_alive() const;

  // Ranks that are started or admitted from now on belong to it.
  int generation() const { return generation_; }
  void begin_generation(int number) { generation_ = number; }
  void begin_generation(int number, const PlaceInJob& place);

  void start(LocalRank& rank);    // throws SystemError
  void restart(LocalRank& rank);  // kills what is left of its process
  void admit(LocalRank& rank);    // which waits for the next generation: to this one
  void start_spare();             // if there is none, and all ranks have met: until then they need the cores
  void signal_all(int signal) const;
  void end_what_they_left();  // processes of ranks that have ended, and what is still in their pipes

  // For the next poll, in which ends of ranks go to `ended`.
  void add_events(std::vector<Event>& events, std::vector<LocalRank*>& ended);

  std::optional<milliseconds> next_look() const { return watch_.next_look(); }
  bool kill_the_one_that_hangs();  // false: none does. To be called at next_look()

  RankFailure failure_of(const LocalRank& rank) const;  // which has ended

 private:
  std::optional<JobPage> make_page() const;
  std::string name_of_job() const;
  ProcessOptions process_of(const LocalRank& rank);
  Variables variables(int seat) const;
  std::string log_of(const LocalRank& rank, const char* suffix) const;  // "": there is none
  UniqueFd open_output(const LocalRank& rank, RankStream& stream, const char* suffix) const;

  const StartOptions& options_;
  Machines* machines_;  // null: they do not number themselves
  ProcessOptions what_;
  Keeper* keeper_;
  Sinks& sinks_;
  Guardian guardian_;
  std::optional<ReservedPort> port_;
  PlaceInJob place_;
  int generation_ = 0;
  CoreSet cores_;  // to pin ranks to; empty: they are not pinned
  std::optional<Spare> spare_;
  std::optional<JobPage> page_;
  HangWatch watch_;
  IntVector<LocalRank> ranks_;
};

}  // namespace lockstep
