// SPDX-License-Identifier: Apache-2.0
// agent/start/local_ranks.h: the ranks of this machine: their processes, what each of them gets, and what they print.
//
// Flow:    launcher.cc, and generations.h after a loss -> here -> one process per rank, or a spare that becomes one
// Owns:    the processes, until it is destroyed; the page on which ranks publish what they do; spares; pipes
// Threads: the launcher's only one
//
// A seat is the number of a rank on its machine, which it keeps. Its rank in the job may change when ranks are lost.
#pragma once

#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

#include "agent/clusters/environment.h"
#include "agent/meet/epoch.h"
#include "agent/recover/keeper.h"
#include "agent/start/events.h"
#include "agent/start/launcher.h"
#include "agent/start/output.h"
#include "agent/start/process.h"
#include "agent/start/spares.h"
#include "agent/watch/hang_watch.h"
#include "lockstep/base/int_vector.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/cores.h"
#include "lockstep/observe/job_page.h"

namespace lockstep {

struct LocalRank {
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
  bool is_waiting() const { return waits && !end; }
};

// The ends at which this process passes the ranks' output on.
struct Sinks {
  Sink out{STDOUT_FILENO};
  Sink err{STDERR_FILENO};
};

std::string log_path(const LaunchOptions& options, int rank, const std::string& suffix);  // in log_dir

class LocalRanks {
 public:
  // Starts none yet. The references, and `keeper` (null: lost ranks are not replaced), must outlive this.
  LocalRanks(const LaunchOptions& options, const ProcessOptions& what, const SignalReader& signals, Keeper* keeper,
             Sinks& sinks);

  auto begin() { return ranks_.begin(); }
  auto end() { return ranks_.end(); }
  auto begin() const { return ranks_.begin(); }
  auto end() const { return ranks_.end(); }
  LocalRank* find(int seat) { return seat >= 0 && seat < ranks_.size() ? &ranks_[seat] : nullptr; }
  int seat_of(const LocalRank& rank) const { return static_cast<int>(&rank - &*ranks_.begin()); }
  bool is_server(const LocalRank& rank) const { return seat_of(rank) < options_.servers; }
  int count_alive() const;
  bool all_have_ended() const { return count_alive() == 0; }

  // The life of a World, from one loss of a rank to the next. Ranks that are started or admitted from now on belong to it.
  int generation() const { return generation_; }
  void begin_generation(int number) { generation_ = number; }
  void begin_generation(int number, const PlaceInJob& place);

  void start(LocalRank& rank);    // throws SystemError
  void restart(LocalRank& rank);  // kills what is left of its process
  void admit(LocalRank& rank);    // which waits for the next generation: to this one
  void start_spares();            // those that are missing, if all ranks have met: until then they need the cores
  void signal_all(int signal) const;
  void end_what_they_left();  // processes of ranks that have ended, and what is still in their pipes

  // Ends of ranks go to `ended`, in the same poll. A reader of the output that has stopped does not stop the ranks.
  void add_events(std::vector<Event>& events, std::vector<LocalRank*>& ended);

  std::optional<milliseconds> next_look() const { return watch_.next_look(); }
  bool kill_the_one_that_hangs();  // false: none does. To be called at next_look()

  std::vector<std::string> last_lines(const LocalRank& rank) const;  // of its stderr

 private:
  std::optional<JobPage> make_page() const;
  std::string name_of_job() const;
  ProcessOptions process_of(const LocalRank& rank);
  Variables variables(int seat) const;
  UniqueFd open_output(int rank, RankStream& stream, const std::string& suffix) const;
  std::vector<std::atomic<pid_t>*> groups_of_spares();
  std::vector<int> descriptors() const;
  // A quota of CPU time is no set of cores: others, with theirs, would be pinned to the same ones.
  bool cores_are_ours() const { return allotted_ == static_cast<int>(cores_.size()); }
  int workers() const { return options_.ranks - options_.servers; }

  const LaunchOptions& options_;
  ProcessOptions what_;  // every rank runs
  const SignalReader& signals_;
  Keeper* keeper_;
  Sinks& sinks_;
  Guardian guardian_;
  std::optional<ReservedPort> port_;
  PlaceInJob place_;
  int generation_ = 0;
  CoreSet cores_ = usable_cores();
  int allotted_ = allotted_cores();
  std::optional<Spares> spares_;
  std::optional<JobPage> page_;
  HangWatch watch_;
  IntVector<LocalRank> ranks_;
};

}  // namespace lockstep
