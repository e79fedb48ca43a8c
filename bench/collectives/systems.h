// SPDX-License-Identifier: Apache-2.0
// bench/collectives/systems.h: the systems that are compared, each as processes of this machine that stay and measure
// one case after the other, so that all can take turns at every case.
//
// Flow:    words of cases (cases.h) -> RunningSystem -> its ranks' processes -> seconds
// Owns:    a RunningSystem: the processes and the socket at which they answer, until it goes
// Threads: start them from the main thread while it is the only one (it forks)
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/collectives/cases.h"
#include "bench/processes.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/int_vector.h"

namespace lockstep::bench {

// The process of a rank, or what starts all of them; it calls serve(..., address), or is a program that does.
using RankProgram = std::function<ProcessOptions(int rank, const std::string& address)>;

class RunningSystem {
 public:
  // Starts `processes` of them: one per rank, or one launcher. Blocks until all ranks have connected. Throws
  // lockstep::Error naming the system.
  RunningSystem(std::string name, int ranks, int processes, const RankProgram& program);
  ~RunningSystem();

  const std::string& name() const { return name_; }

  // The slowest rank's, or nothing if the system has no such case. Throws lockstep::Error: it failed or hangs.
  std::optional<double> seconds(const std::string& word);

 private:
  void accept_rank();
  void wait_readable(const UniqueFd& fd) const;
  std::string read_line(const UniqueFd& rank) const;

  std::string name_;
  TemporaryFolder folder_;
  UniqueFd listener_;
  IntVector<UniqueFd> ranks_;
  std::list<Process> processes_;
};

using RunningSystemPtr = std::unique_ptr<RunningSystem>;

RunningSystemPtr start_lockstep(int ranks);  // also "memcpy": every rank copies that many bytes at once
RunningSystemPtr start_gloo(int ranks);
RunningSystemPtr start_open_mpi(int ranks);
RunningSystemPtr start_mpich(int ranks);
RunningSystemPtr start_oneccl(int ranks);  // over MPICH; all_reduce only

// A rank of c10d's Gloo. Blocks until all have come.
struct GlooOptions {
  std::string store;  // a file where the ranks meet
  int rank = 0;
  int size = 1;
  std::string address = "127.0.0.1";  // of this rank's machine
};
std::unique_ptr<System> make_gloo_rank(const GlooOptions& options);

struct Peer {
  std::string name;
  std::string missing;  // why it can't be measured here; empty: it can
  RunningSystemPtr (*start)(int ranks);
};
std::vector<Peer> peers();

}  // namespace lockstep::bench
