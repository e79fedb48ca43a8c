// SPDX-License-Identifier: Apache-2.0
// cli/compare/metrics.h: what the metrics file of one run says.
//
// Threads: pure functions
#pragma once

#include <optional>

#include "cli/compare/settings.h"

namespace lockstep::compare {

struct Metrics {
  std::vector<double> step_seconds;
  std::vector<double> step_samples;
  std::vector<double> step_losses;
  std::vector<double> epoch_seconds;
  std::vector<std::optional<double>> epoch_accuracies;  // nothing: no validation data
  Json totals;                                          // of the event at the end; null: it did not come so far

  int steps() const { return static_cast<int>(step_seconds.size()); }
  std::optional<double> total(const std::string& name) const;

  // Of the steps after the first few, which connect, order buckets and grow memory.
  std::optional<double> seconds_per_step() const;    // the median
  std::optional<double> samples_per_second() const;  // the mean
  std::optional<double> loss() const;                // the mean of the last tenth of the steps
  std::optional<double> bytes_per_step() const;  // exchanged, or pushed and pulled; nothing: the strategy counts none
  std::optional<double> waiting()
      const;  // the share of time in which rank 0 waits for others or for data; of no pipeline
};

// Lines that are not whole, or no metrics, are left out: a run may be at work on the file, or may have died. A file that is not
// there is an empty one.
Metrics read_metrics(const std::filesystem::path& path);

}  // namespace lockstep::compare
