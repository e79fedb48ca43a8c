// strategy/kvstore/server_statistics.h: what a server has measured: the columns of S2's table, and the delays.
//
// Threads: one at a time (the server's lock); a copy is a value
// Ranks:   a server's own
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "lockstep/strategy.h"
#include "lockstep/strategy/kvstore/delay_histogram.h"
#include "lockstep/strategy/kvstore/messages.h"

namespace lockstep {

// Least and most of what was added.
class Span {
 public:
  void add(double value) {
    least_ = std::min(least_, value);
    most_ = std::max(most_, value);
  }
  double least() const { return least_ > most_ ? 0 : least_; }
  double most() const { return least_ > most_ ? 0 : most_; }
  std::string text() const;  // "32", or "32-33"

 private:
  double least_ = std::numeric_limits<double>::max();
  double most_ = std::numeric_limits<double>::lowest();
};

struct ServerStatistics {
  std::string store;  // "dist_async"
  int workers = 0;
  std::int64_t updates = 0;
  Span devices;             // of a worker
  Span samples_per_device;  // in one gradient
  Span samples_per_update;
  DelayHistogram delays;

  void add_gradient(const QuestionHeader& push, std::int64_t delay);
  void add_update(std::int64_t samples);

  Report report() const;
  std::string table() const;  // S2's row, and the histogram where there is a delay
};

}  // namespace lockstep
