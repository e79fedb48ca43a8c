// strategy/kvstore/delay_histogram.h: how old gradients were when they were applied.
//
// Threads: a value
// Ranks:   a server's own
//
// The delay of a gradient: updates made elsewhere between the moment its worker read the weights and the moment the
// gradient is applied. S2.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace lockstep {

class DelayHistogram {
 public:
  void add(std::int64_t delay) { ++counts_[delay]; }

  std::int64_t gradients() const;
  std::int64_t max() const { return counts_.empty() ? 0 : counts_.rbegin()->first; }
  double mean() const;
  const std::map<std::int64_t, std::int64_t>& counts() const { return counts_; }  // delay -> gradients
  std::string text() const;  // a line with a bar per delay; neighbours together where there are many

 private:
  std::map<std::int64_t, std::int64_t> counts_;
};

}  // namespace lockstep
