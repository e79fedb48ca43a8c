// SPDX-License-Identifier: Apache-2.0
// train/reports/progress.h: what a person sees: a table with a line per epoch on stdout; between its lines, on stderr, a bar
// that rewrites itself on a terminal, or a plain line now and then in a pipe.
//
// Flow:    train/loop.h -> here -> the terminal
// Threads: one thread
// Ranks:   rank 0 shows; on the others every call does nothing
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/deadline.h"
#include "lockstep/train/reports/metrics.h"

namespace lockstep {

// The place of a run: what a checkpoint keeps beside tensors.
struct Position {
  int64_t epoch = 0;
  int64_t step_in_epoch = 0;
  int64_t step = 0;     // since the start
  int64_t samples = 0;  // since the start
  // The current epoch so far:
  double epoch_loss = 0;  // sum over samples
  int64_t epoch_samples = 0;
  int64_t epoch_surplus = 0;  // by which Task::samples counts more than these; may be negative
  double epoch_seconds = 0;
  // The epoch with the lowest validation loss; -1: there is none yet.
  int64_t best_epoch = -1;
  int64_t best_step = -1;  // its checkpoint, which is kept; -1: it is not
  double best_loss = 0;
};

// How long a run is.
struct RunLength {
  int64_t epochs = 0;
  int64_t steps_per_epoch = 0;
  int64_t last_step = 0;
};

class Progress {
 public:
  explicit Progress(bool shown);

  void begin_run(const std::string& headline, const RunLength& length);
  void begin_epoch(const Position& position);
  void step(const Position& position, double loss);  // after the step
  void end_epoch(const Json& epoch);
  void end_run(const Json& run, const std::string& table);  // table: the strategy's; may be empty

 private:
  enum class Style { kNone, kPlain, kBar };  // a bar on a terminal

  std::string status(const Position& position, double loss) const;
  void clear_bar() const;

  Style style_;
  RunLength length_;
  Position epoch_began_;  // here: after a resume, within the epoch
  Stopwatch epoch_watch_;
  double last_shown_ = 0;
};

}  // namespace lockstep
