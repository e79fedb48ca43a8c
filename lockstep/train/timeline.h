// SPDX-License-Identifier: Apache-2.0
// train/timeline.h: --trace: one file with what every rank did when, for Perfetto and chrome://tracing.
//
// Flow:    base/trace.h, the ring of each rank -> finish(): to rank 0, with its clock -> the file
//          a run that failed: the rings' files -> save_what_is_left(), in the launcher -> the file
// Owns:    the file of this rank's ring, FILE.rank3, until finish() removes it
// Threads: one thread
// Ranks:   all ranks make one and finish it; rank 0 writes
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "lockstep/world.h"

namespace lockstep {

// Steps [first, end).
struct StepRange {
  std::int64_t first = 0;
  std::int64_t end = std::numeric_limits<std::int64_t>::max();
  bool has(std::int64_t step) const { return step >= first && step < end; }
};
StepRange parse_steps(const std::string& text);  // "100:120"; "": all. Throws UsageError

class Timeline {
 public:
  // Records nothing if `file` is empty. Else compares this machine's clock with rank 0's, by messages, and blocks until
  // rank 0 has answered. Throws SystemError: no room for the ring beside `file`.
  Timeline(const World& world, std::string file, StepRange steps);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  void begin_step(std::int64_t step);  // records from here on, if the step is one of those

  // Sends the ring to rank 0, which writes the file. Blocks until it has the ring. If a rank is lost by now, or ranks end
  // at different times (`together` is false), the rings' files stay for the launcher. Throws SystemError: rank 0 can't write
  // the file.
  void finish(bool together);

 private:
  void gather();

  World world_;
  std::string file_;
  StepRange steps_;
};

// Puts the rings that the ranks of this machine have left beside `file` into it and removes them; marked as incomplete
// where a rank has not finished. Nothing where there are none.
// For a run that has failed: what goes wrong is a warning in the log.
void save_what_is_left(const std::string& file);

void remove_rings(const std::string& file);  // of an earlier run

}  // namespace lockstep
