// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/statistics.h: what a store measures: batch sizes, updates, bytes, and the delay of each gradient.
//
// Threads: one at a time (the server's lock); a copy is a value
// Ranks:   a server's own
//
// The delay of a gradient is the number of updates made with other gradients between the moment its worker read the
// weights and the moment it is applied.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>

#include "lockstep/base/to_size.h"
#include "lockstep/strategy.h"

namespace lockstep {

// The least and the most of sizes, which are not negative.
class Extremes {
 public:
  void add(double value) {
    least_ = std::min(least_, value);
    most_ = std::max(most_, value);
  }
  double most() const { return most_; }
  std::string text() const;  // "32", or "32-33"; "0" if nothing was added

 private:
  double least_ = std::numeric_limits<double>::max();
  double most_ = 0;
};

class DelayHistogram {
 public:
  void add(int64_t delay) {
    ++counts_[delay];
    ++gradients_;
    sum_ += delay;
  }

  int64_t gradients() const { return gradients_; }
  int64_t max() const { return counts_.empty() ? 0 : counts_.rbegin()->first; }
  double mean() const { return fraction(sum_, std::max<int64_t>(gradients_, 1)); }
  const std::map<int64_t, int64_t>& counts() const { return counts_; }  // delay -> gradients
  std::string text() const;  // at most 17 lines with a bar each, several delays in a line where there are more

 private:
  std::map<int64_t, int64_t> counts_;
  int64_t gradients_ = 0, sum_ = 0;
};

struct StoreStatistics {
  std::string store;  // its kind, such as "dist_async"
  int workers = 0;
  int64_t updates = 0;
  Extremes devices;             // of a worker
  Extremes samples_per_device;  // in one gradient
  Extremes samples_per_update;
  DelayHistogram delays;
  int64_t pushed_bytes = 0;  // that came to this server, or that the devices gave to a local store
  int64_t pulled_bytes = 0;  // that it sent, or that a local store copied to the devices

  // Gradients and updates of no samples are not counted.
  void add_gradient(int64_t samples, int64_t devices_of_worker, int64_t delay);
  void add_update(int64_t samples);

  Report report() const;
  std::string table() const;  // a row, and the histogram if any gradient had a delay
};

}  // namespace lockstep
