// SPDX-License-Identifier: Apache-2.0
// train/progress.h: what a person sees: a table with a line per epoch on stdout; between its lines, on stderr, a bar
// that rewrites itself on a terminal, or a plain line now and then in a pipe.
//
// Flow:    train/loop.h -> here -> the terminal
// Threads: one thread
// Ranks:   rank 0 shows; on the others every call does nothing
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/deadline.h"
#include "lockstep/train/metrics.h"

namespace lockstep {

// What lies ahead when an epoch begins, or goes on after a resume.
struct EpochPlan {
  std::int64_t epoch = 0;  // from 0
  std::int64_t epochs = 0;
  std::int64_t done = 0;   // steps of this epoch
  std::int64_t steps = 0;  // of this epoch in all
  std::int64_t run_steps_left = 0;
};

class Progress {
 public:
  enum class Style { kNone, kPlain, kBar };
  static Style style_for_stderr();  // kBar on a terminal, else kPlain

  explicit Progress(Style style) : style_(style) {}

  void begin_run(const std::string& headline);
  void begin_epoch(const EpochPlan& plan);
  void step(const StepMetrics& metrics);
  void end_epoch(const EpochMetrics& metrics);
  void end_run(const RunMetrics& metrics, const std::string& table);  // of the strategy; may be empty

 private:
  std::string status(const StepMetrics& metrics) const;
  void clear_bar() const;

  Style style_;
  EpochPlan plan_;
  std::int64_t steps_ = 0;    // since the epoch began here
  std::int64_t samples_ = 0;  // likewise
  Stopwatch epoch_watch_;
  double last_shown_ = 0;
};

}  // namespace lockstep
