// SPDX-License-Identifier: Apache-2.0
// collective/shm/partition.h: how an array is cut into one part per rank.
//
// Threads: values
// Ranks:   all ranks compute the same parts
#pragma once

#include <algorithm>
#include <numeric>
#include <span>

#include "lockstep/base/cache_line.h"
#include "lockstep/collective/calls/call.h"

namespace lockstep::shm {

struct Part {
  size_t begin = 0;  // elements, or bytes
  size_t count = 0;

  // Chunk number `index` of those that have `most` elements each; the last one may be shorter, or empty.
  Part chunk(size_t index, size_t most) const {
    const size_t skipped = std::min(count, index * most);
    return {begin + skipped, std::min(most, count - skipped)};
  }
};

inline size_t chunks_of(size_t count, size_t most) { return (count + most - 1) / most; }

class Partition {
 public:
  // `count` elements into `parts` parts that begin at multiples of `unit`; the last ones may be shorter, or empty.
  static Partition even(size_t count, int parts, size_t unit) {
    const auto divisor = static_cast<unsigned>(parts);
    return {count, round_up((count + divisor - 1) / divisor, unit), {}};
  }
  static Partition equal(size_t count_of_part, int parts) {
    return {count_of_part * static_cast<unsigned>(parts), count_of_part, {}};
  }
  // `counts` must outlive this.
  static Partition uneven(std::span<const size_t> counts) {
    return {std::accumulate(counts.begin(), counts.end(), size_t{0}), 0, counts};
  }
  // The parts that a call names: its counts, or equal ones. The call must outlive this.
  static Partition of(const Call& call, int ranks) {
    return call.counts.empty() ? equal(call.count, ranks) : uneven(call.counts);
  }

  Part operator[](int rank) const {
    const auto index = static_cast<unsigned>(rank);
    if (!counts_.empty()) return {std::accumulate(counts_.begin(), counts_.begin() + rank, size_t{0}), counts_[index]};
    const size_t begin = std::min(total_, index * share_);
    return {begin, std::min(share_, total_ - begin)};
  }

  size_t total() const { return total_; }
  size_t longest() const { return counts_.empty() ? std::min(share_, total_) : std::ranges::max(counts_); }

 private:
  Partition(size_t total, size_t share, std::span<const size_t> counts)
      : total_(total), share_(share), counts_(counts) {}

  size_t total_;
  size_t share_;  // of a rank, where `counts_` is empty
  std::span<const size_t> counts_;
};

}  // namespace lockstep::shm
