// SPDX-License-Identifier: Apache-2.0
// train/metrics.h: what a run reports: one JSON object a line, flushed per line, in the format of the README.
//
// Flow:    train/loop.h -> here -> the file of --metrics
// Threads: one thread
// Ranks:   rank 0 writes; on the others every call does nothing
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/loader.h"

namespace lockstep {

struct StepMetrics {
  std::int64_t epoch = 0;
  std::int64_t step = 0;  // since the start of the run, from 0
  double loss = 0;        // mean over the global batch
  double seconds = 0;
  std::int64_t samples = 0;
};

struct EpochMetrics {
  std::int64_t epoch = 0;
  double seconds = 0;  // training alone, without validation
  std::int64_t samples = 0;
  double train_loss = 0;
  double val_loss = 0;      // NaN without validation data
  double val_accuracy = 0;  // likewise
  double samples_per_second() const { return static_cast<double>(samples) / seconds; }
};

struct RunMetrics {
  std::string strategy;
  std::string model;
  std::string data;
  int ranks = 1;
  std::vector<std::string> devices;
  std::int64_t epochs = 0;
  std::int64_t steps = 0;
  std::int64_t samples = 0;
  double seconds = 0;
  double train_loss = 0;
  double val_accuracy = 0;
  LoadingStatistics loading;  // of rank 0, added up over the steps, like those below
  double forward_seconds = 0;
  double backward_seconds = 0;
  double exchange_seconds = 0;
  double update_seconds = 0;
  std::vector<std::pair<std::string, double>> measured;  // by the strategy, under names of its own
};

class MetricsFile {
 public:
  MetricsFile() = default;                                     // writes nothing
  explicit MetricsFile(const std::string& path, bool append);  // throws SystemError
  void write(const StepMetrics& metrics);
  void write(const EpochMetrics& metrics);
  void write(const RunMetrics& metrics);
  void write_resume(std::int64_t step);  // lines of steps from here on take the place of earlier ones

 private:
  void line(const std::string& json);
  std::string path_;
  std::ofstream out_;
};

}  // namespace lockstep
