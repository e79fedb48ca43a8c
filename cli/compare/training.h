// SPDX-License-Identifier: Apache-2.0
// cli/compare/training.h: one run of a comparison: starts `lockstep train`, watches it and ends it.
//
// Flow:    Run -> here -> child processes, which write metrics.jsonl and output.txt into the run's folder -> Outcome
// Owns:    the processes, until train() returns; if this process is killed, they are, too
// Threads: call from the main thread while it is the only one (it forks)
#pragma once

#include <optional>

#include "cli/compare/plan.h"
#include "lockstep/base/unique_fd.h"

namespace lockstep::compare {

// SIGINT and SIGTERM are held back from its construction on, and read from a descriptor.
class StopSignals {
 public:
  StopSignals();
  int fd() const { return fd_.get(); }
  int received() const;  // the number of the one that has come; 0: none

 private:
  UniqueFd fd_;
};

struct Outcome {
  std::string why;  // it failed; empty: it did not
  int exit_code = 0;
  double seconds = 0;
  double peak_memory_bytes = 0;  // of all its processes together, shared pages once (PSS)
  std::optional<bench::LinkBytes>
      link_bytes;      // of a step, of the busiest host in each direction; with shaped links only
  int stopped_by = 0;  // a signal to this process; such a run is made again
};

struct Place {
  std::filesystem::path folder;  // of the run; exists
  double deadline_seconds = 0;   // then the run is killed and has failed
};

// Blocks until the run has ended, at most until its deadline. Throws SystemError: no process or network can be made.
Outcome train(const Run& run, const Settings& settings, const Place& place, const StopSignals& signals);

// Whether hosts with shaped links can be made here; if not, `why` says what is missing.
bool can_shape_links(const bench::LinkOptions& link, std::string& why);

}  // namespace lockstep::compare
