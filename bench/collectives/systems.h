// bench/collectives/systems.h: the systems that are compared, each run as processes of this machine.
//
// Flow:    words of cases (cases.h) -> one process per rank -> seconds by word
// Owns:    the processes, until a run returns
// Threads: call from the main thread while it is the only one (it forks)
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace lockstep::bench {

using Words = std::vector<std::string>;
using Seconds = std::map<std::string, double>;  // by word; a case that a system does not have is missing

// Throw lockstep::Error: a rank failed, or did not end in time.
Seconds run_lockstep(int ranks, const Words& words);  // also "memcpy": every rank copies that many bytes at once
Seconds run_gloo(int ranks, const Words& words);
Seconds run_open_mpi(int ranks, const Words& words);
Seconds run_mpich(int ranks, const Words& words);

struct Peer {
  std::string name;
  std::string missing;  // why it can't be measured here; empty: it can
  Seconds (*run)(int ranks, const Words& words);
};
std::vector<Peer> peers();

// For the above: a process per command or body, all at once; what they wrote to stdout, parsed.
struct RankProgram {
  std::vector<std::string> command;
  std::function<int()> body;                                   // instead of a command
  std::vector<std::pair<std::string, std::string>> variables;  // set in its environment
  bool pinned = false;                                         // to its share of the cores
};
Seconds run_programs(const std::string& system, const std::vector<RankProgram>& programs);
Seconds parse_seconds(int fd);  // lines of a name and a number

}  // namespace lockstep::bench
