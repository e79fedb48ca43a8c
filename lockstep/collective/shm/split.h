// collective/shm/split.h: how an array is cut into one part per rank.
//
// Threads: a value
// Ranks:   all ranks compute the same parts
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>

#include "lockstep/base/cache_line.h"

namespace lockstep::shm {

struct Part {
  std::size_t begin = 0;  // elements
  std::size_t count = 0;
};

class Split {
 public:
  // `count` elements into `parts` parts that begin at multiples of `unit`; the last ones may be shorter, or empty.
  static Split even(std::size_t count, int parts, std::size_t unit) {
    const std::size_t share = (count + static_cast<std::size_t>(parts) - 1) / static_cast<std::size_t>(parts);
    return {count, round_up(share, unit), {}};
  }
  static Split equal(std::size_t count_of_part, int parts) {
    return {count_of_part * static_cast<std::size_t>(parts), count_of_part, {}};
  }
  // `counts` must outlive this.
  static Split uneven(std::span<const std::size_t> counts) {
    return {std::accumulate(counts.begin(), counts.end(), std::size_t{0}), 0, counts};
  }

  Part operator[](int rank) const {
    const auto index = static_cast<std::size_t>(rank);
    if (!counts_.empty())
      return {std::accumulate(counts_.begin(), counts_.begin() + rank, std::size_t{0}), counts_[index]};
    const std::size_t begin = std::min(total_, index * share_);
    return {begin, std::min(share_, total_ - begin)};
  }

  std::size_t total() const { return total_; }
  std::size_t longest() const { return counts_.empty() ? std::min(share_, total_) : std::ranges::max(counts_); }

 private:
  Split(std::size_t total, std::size_t share, std::span<const std::size_t> counts)
      : total_(total), share_(share), counts_(counts) {}

  std::size_t total_;
  std::size_t share_;
  std::span<const std::size_t> counts_;
};

}  // namespace lockstep::shm
