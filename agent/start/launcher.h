// SPDX-License-Identifier: Apache-2.0
// agent/start/launcher.h: starts the ranks of a job on this machine as processes, watches them, and ends all when one fails.
//
// Flow:    `lockstep run`, `lockstep train --ranks N`, lockstep::run() -> here -> one process per rank
// Owns:    the processes it starts, until launch() returns: by then every one has been waited for
// Threads: call launch() from the main thread, before any other thread is started (it forks)
// Ranks:   this is not a rank; it is the parent of the ranks of one machine
//
// The ranks get: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT (torchrun's
// names), LOCKSTEP_JOB (on one machine: a name that no other job has), OMP_NUM_THREADS (what is set already, else cores / ranks),
// LOCKSTEP_PAGE (where they publish what they do: job_page.h), the cores of their share, /dev/null as stdin.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/watch/hang_options.h"

namespace lockstep {

class Machines;
struct PlaceInJob;

struct LaunchOptions {
  int ranks = 1;    // on this machine
  int servers = 0;  // the first of them: not pinned; every rank gets LOCKSTEP_LOCAL_SERVERS
  // How often a rank that fails may be replaced by a new process (agent/recover/keeper.h); each time counts once, however many
  // ranks fail together, as torchrun counts. 0: a failure ends the job.
  int max_restarts = 0;
  // With no restart left the job goes on without the failed rank, while so many are left. 0: it ends. On one machine.
  int min_ranks = 0;
  // Processes that wait to take the place of a lost rank (agent/start/spares.h), of a Python program whose ranks are replaced.
  int spares = 1;
  bool workers_may_fail = false;  // the job continues without a failed rank that is no server, while others are left
  int nodes = 1;
  int node_rank = 0;
  // Machines that number themselves: these say how many there are and which this is, at first and whenever one is lost or comes.
  // Then nodes, node_rank and the address do not count. Restarts are counted over all machines.
  std::shared_ptr<Machines> machines{};
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // 0: a free one, kept reserved while the job runs; only with one node
  bool pin = true;      // each rank to its own cores
  // Every line of the ranks is passed on with "[rank 2] " before it. But with first_is_plain rank 0's stdout is passed on as it is, it
  // writes to this process's stderr directly, and the lines of the others all go to stderr.
  bool first_is_plain = false;
  std::string log_dir{};  // not "": instead into LOG_DIR/rank2.out and rank2.err; made if missing
  milliseconds grace = std::chrono::seconds(5);  // between SIGTERM and SIGKILL

  // Signals by which ranks are asked to stop in their own time: passed on, and no more. A second SIGINT kills the ranks.
  std::vector<int> stop_signals{};
  // The exit code of a rank that has stopped because it was asked to: no failure. None: 143, if this process has asked.
  std::optional<int> stop_code{};

  HangOptions hang{};  // of ranks that publish what they do, which those that use lockstep do by themselves
};

PlaceInJob place_of(const LaunchOptions& options);

struct RankFailure {
  int rank = 0;  // the first that failed
  int pid = 0;
  int exit_code = 0;                    // when it exited by itself
  int signal = 0;                       // when a signal ended it
  std::string hang;                     // why the launcher has killed it; else empty
  std::vector<std::string> last_lines;  // of its stderr, at most 20; empty where it wrote to the terminal directly
};

struct LaunchResult {
  int restarts = 0;
  int exit_code = 0;  // 0; the failed rank's own code; stop_code; 128 + n for a signal, also one sent to the launcher
  std::optional<RankFailure> failure;
  std::optional<std::string> lost{};  // why this machine can't go on without the others
};

// With max_restarts each rank also gets LOCKSTEP_KEEPER, TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_MAX_RESTARTS. A new
// process takes the place of a rank that fails. The others are not ended: their World throws PeerLost, and they come back
// through JobMemory::next_generation(). A rank that does not, and fails too, is replaced as well; one that has not met
// the others yet is killed and replaced. Exit code 2 says that the program was used in a wrong way: it ends the job.
//
// Runs PROGRAM ARGS in every rank. Blocks as long as a rank runs: a job has no time limit, and a rank ends by itself, by
// its own deadlines in collectives, by a signal, or because it hangs (hang_watch.h). When one fails (with
// workers_may_fail: one that the job needs) the others get SIGTERM (and SIGCONT, in case they are stopped) and, after the
// grace period, SIGKILL.
// SIGINT and SIGTERM are passed on to all ranks, with the same grace period, unless they are among stop_signals. When
// this process is killed, even by SIGKILL, the ranks and what they started are killed too. The ranks go on when nobody
// reads stdout or stderr for a while: their output is kept in memory, then in a nameless temporary file. At the end it is
// written; like any program that writes to a pipe this blocks until the reader goes on, but signals have their usual
// effect by then.
//
// Throws UsageError (options that make no sense), SystemError (no such program, no processes left).
LaunchResult launch(const LaunchOptions& options, const std::vector<std::string>& command);

// The same for a function of this program, in forked children: they find the libraries of this process already loaded.
// The child exits with what `body` returns; an exception that leaves it is printed and exits with 1 (UsageError: 2).
LaunchResult launch(const LaunchOptions& options, const std::function<int()>& body);

// Says what has failed: rank, pid, exit code or signal, and its last lines, in the form of lockstep/error.h.
std::string describe(const RankFailure& failure, const LaunchOptions& options);

}  // namespace lockstep
