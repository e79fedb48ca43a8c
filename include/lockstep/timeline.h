// SPDX-License-Identifier: Apache-2.0
// lockstep/timeline.h: one file with what every rank did when, for Perfetto (ui.perfetto.dev) and chrome://tracing: what
// `lockstep train --trace` writes, for your own training loop.
//
// Without a line of code LOCKSTEP_TRACE=FILE.json or `lockstep run --trace FILE.json` does the same from World::from_env
// on; docs/watching.md says what differs.
//
// Flow:    spans and counters -> the ring of each rank -> finish(): to rank 0, with its clock -> the file
//          a run that failed: the rings' files -> `lockstep run`, `lockstep trace` -> the file
// Owns:    the file of this rank's ring, FILE.rank3, until finish() removes it
// Threads: one thread; spans are recorded on all
// Ranks:   all ranks make one and finish it; rank 0 writes
#pragma once

#include <limits>

#include "lockstep/world.h"

namespace lockstep {

// Steps [first, end).
struct StepRange {
  int64_t first = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
  bool has(int64_t step) const { return step >= first && step < end; }
};
StepRange parse_steps(const std::string& text);  // "100:120"; "": all. Throws UsageError

class Timeline {
 public:
  // Records nothing if `file` is empty. Else compares this machine's clock with rank 0's, by messages, and blocks until
  // rank 0 has answered. Records from here on, or where there are `steps`, from begin_step(). Throws SystemError: no
  // room for the ring beside `file`. UsageError: not .json; a second one in this process.
  Timeline(const World& world, std::string file, StepRange steps = {});
  ~Timeline();  // ends recording. Without finish() the rings stay: `lockstep trace FILE` makes the file of them
  Timeline& operator=(Timeline&&) = delete;

  void begin_step(int64_t step);  // records from here on, if the step is one of those

  // Sends the ring to rank 0, which writes the file. Blocks until the file is written. If it can't be (a warning in the log),
  // a rank is lost by now, or ranks end at different times (`together` is false), the rings' files stay for the launcher,
  // and `lockstep trace FILE`.
  void finish(bool together = true);

 private:
  void gather();

  World world_;
  std::string file_;
  StepRange steps_;
};

}  // namespace lockstep
