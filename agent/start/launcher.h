// SPDX-License-Identifier: Apache-2.0
// agent/start/launcher.h: starts the ranks of a job on this machine as processes, watches them, and ends all when one fails.
//
// Flow:    `lockstep run`, `lockstep train --ranks N`, lockstep::run() -> here -> one process per rank
// Owns:    the processes it starts, until launch() returns: by then every one has been waited for
// Threads: call launch() from the main thread, before any other thread is started (it forks)
// Ranks:   this is not a rank; it is the parent of the ranks of one machine
//
// The ranks get the variables that docs/process.md lists, the cores of their share, /dev/null as stdin.
#pragma once

#include <memory>

#include "agent/meet/epoch.h"
#include "agent/start/process.h"
#include "agent/watch/hang_options.h"

namespace lockstep {

class Machines;

// The ranks that are started on this machine.
struct StartOptions {
  int ranks = 1;
  int servers = 0;  // the first of them: not pinned; every rank gets LOCKSTEP_LOCAL_SERVERS
  bool pin = true;  // each rank to its own cores
  // Lines of the ranks are passed on with "[rank 2] " before them. But with first_is_plain rank 0's stdout is passed on as it is, it
  // has this process's stderr, and lines of the others all go to stderr.
  bool first_is_plain = false;
  std::string log_dir{};  // not "": instead into LOG_DIR/rank2.out and rank2.err; made if missing
};

// The place of this machine in the job, and where the ranks of all machines meet.
struct PlaceOptions {
  int nodes = 1;
  int node_rank = 0;
  std::string master_addr{};  // "": this machine
  int master_port = 0;        // 0: a free one, kept reserved while the job runs; only with one node
  // Machines that number themselves: then the rest does not count, and restarts are counted over all machines.
  std::shared_ptr<Machines> machines{};
};
PlaceInJob place_of(const PlaceOptions& place, int ranks);

// Rules for a rank that fails, hangs, or is told to stop.
struct FailureOptions {
  // How often ranks that fail may be replaced by new processes; ranks that fail together count once, as torchrun counts.
  // 0: a failure ends the job.
  int max_restarts = 0;
  // With no restart left the job goes on without the failed rank, while so many are left. 0: it ends. On one machine.
  int min_ranks = 0;
  bool workers_may_fail = false;  // the job continues without a failed rank that is no server, while others are left
  milliseconds grace = std::chrono::seconds(5);  // between SIGTERM and SIGKILL
  // Signals by which ranks are asked to stop in their own time: passed on, and no more. A second SIGINT kills the ranks.
  std::vector<int> stop_signals{};
  // The exit code of a rank that has stopped because it was asked to: no failure. None: 143, if this process has asked.
  std::optional<int> stop_code{};
  HangOptions hang{};  // of ranks that publish what they do, which those that use lockstep do by themselves
};

struct RankFailure {
  int rank = 0;  // the first that failed
  int world_size = 1;
  int pid = 0;
  ExitStatus end{};
  std::string hang{};                     // why the launcher has killed it; else empty
  std::string log{};                      // the file of its stderr, where there is one
  std::vector<std::string> last_lines{};  // of its stderr, at most 20; empty where it wrote to the terminal directly
};

struct LaunchResult {
  int restarts = 0;
  int exit_code = 0;  // 0; the failed rank's own code; stop_code; 128 + n for a signal, also one sent to the launcher
  std::optional<RankFailure> failure{};
  std::optional<std::string> lost{};  // why this machine can't go on without the others
};

// Runs PROGRAM ARGS in every rank. Blocks as long as a rank runs: a job has no time limit, and a rank ends by itself, by
// its own deadlines in collectives, by a signal, or because it hangs (hang_watch.h). When one fails that the job needs, the
// others get SIGTERM (and SIGCONT, in case they are stopped) and, after the grace period, SIGKILL. So they do after SIGINT and
// SIGTERM, unless these are stop_signals. When this process is killed, even by SIGKILL, the ranks and what they started are
// killed too. At the end this blocks until the reader has taken their output, but signals have their usual effect by then.
//
// With max_restarts a new process takes the place of a rank that fails (HACKING.md: "A rank dies"). Exit code 2 says that the
// program was used in a wrong way: it ends the job.
//
// Throws UsageError (options that make no sense), SystemError (no such program, no processes left).
LaunchResult launch(const StartOptions& start, const std::vector<std::string>& command,
                    const FailureOptions& failing = {}, const PlaceOptions& place = {});

// The same for a function of this program, in forked children, which exit with what it returns; an exception that leaves it is
// printed and exits with 1 (UsageError: 2).
LaunchResult launch(const StartOptions& start, const std::function<int()>& body, const FailureOptions& failing = {},
                    const PlaceOptions& place = {});

// In the form of lockstep/error.h, with its last lines.
std::string describe(const RankFailure& failure);

}  // namespace lockstep
