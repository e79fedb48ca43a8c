// SPDX-License-Identifier: Apache-2.0
// base/median.h: the median of a few figures.
//
// Threads: pure functions
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace lockstep {

// The mean of the middle two where their number is even; requires at least one.
inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace lockstep
