// SPDX-License-Identifier: Apache-2.0
// train/curves.h: --tensorboard: the curves and settings of a run as TensorBoard shows them.
//
// Flow:    train/loop.h -> here -> train/event_file.h -> base/background_writer.h -> a file in the folder
// Owns:    the file; each start of the run has its own, and TensorBoard shows all files of a folder as one run
// Threads: one thread; a slow disk drops points and does not delay it
// Ranks:   rank 0 writes; on the others every call does nothing
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/base/background_writer.h"
#include "lockstep/train/event_file.h"
#include "lockstep/train/metrics.h"
#include "lockstep/train/options.h"

namespace lockstep {

class Curves {
 public:
  Curves() = default;  // writes nothing

  // Makes options.tensorboard if missing, and a file in it. Throws SystemError; UsageError: the folder has curves, and the
  // run is not a resumed one.
  explicit Curves(const TrainOptions& options);
  ~Curves();  // without end_run(), the run counts as failed
  Curves(Curves&&) = default;
  Curves& operator=(Curves&&) = default;

  // From here on; what earlier starts of the run have drawn after `step` is forgotten.
  void begin_run(std::int64_t step, const TrainOptions& options, std::int64_t ranks);

  // Every number of an event of the metrics that is not NaN, as EVENT/NAME: "step/loss".
  void add(const Json& event, std::int64_t step);

  void end_run(std::int64_t step);

 private:
  std::unique_ptr<BackgroundWriter> writer_;
  std::int64_t last_step_ = 0;
  bool ended_ = false;
};

}  // namespace lockstep
