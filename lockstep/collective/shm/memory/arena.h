// SPDX-License-Identifier: Apache-2.0
// collective/shm/memory/arena.h: memory of one rank that its peers can read: gradients and parameters are allocated here.
//
// docs/collectives.md#the-rules-of-the-arena has what holds for its users. The last Memory of an arena frees the arena.
//
// Owns:    Arena: a window on its segment, and the list of free ranges. Memory: its range, and a share of the arena
// Threads: any
// Ranks:   no communication
#pragma once

#include <algorithm>
#include <map>
#include <memory>

#include "lockstep/base/cache_line.h"
#include "lockstep/collective/shm/memory/segment.h"

namespace lockstep::shm {

class Memory;

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  static constexpr size_t kFirstExtent = size_t{64} << 20;

  // Makes one in the segment `fd`, which messages call `name`.
  Arena(UniqueFd fd, std::string name) : window_(std::move(fd), kFirstExtent, std::move(name)) {}

  Window& window() { return window_; }

  // `bytes` bytes at a multiple of 64; not zeroed, except where the memory was never used before.
  // Throws SystemError: the machine has no more memory, RLIMIT_FSIZE, no addresses left.
  Memory allocate(size_t bytes);

 private:
  friend class Memory;
  struct GiveBack {
    void operator()(std::byte*) const { arena->give_back(offset, size); }

    std::shared_ptr<Arena> arena;
    uint64_t offset = 0;
    size_t size = 0;
  };

  static constexpr size_t kPage = 4096;
  static constexpr size_t kGrowthUnit = size_t{1} << 20;

  // Arrays start on a cache line; large ones take whole pages.
  static size_t rounded(size_t bytes) {
    const size_t some = std::max(bytes, size_t{1});
    return round_up(some, some >= kPage ? kPage : kCacheLine);
  }

  using FreeRanges = std::map<uint64_t, size_t>;  // offset -> bytes; each in one extent, no two adjacent there

  uint64_t take(size_t bytes) {
    auto range = best_fit(bytes);
    if (range == free_.end()) {
      grow(bytes);
      range = best_fit(bytes);
    }
    const auto [offset, size] = *range;
    free_.erase(range);
    if (size > bytes) free_.emplace(offset + bytes, size - bytes);
    return offset;
  }

  FreeRanges::iterator best_fit(size_t bytes) {
    auto best = free_.end();
    for (auto range = free_.begin(); range != free_.end(); ++range)
      if (range->second >= bytes && (best == free_.end() || range->second < best->second)) best = range;
    return best;
  }

  // Grows by what is missing behind a free range at the end, in whole units. What does not fit the extent of the window begins the
  // next one that it fits: the file has a hole there, which takes no memory.
  void grow(size_t bytes) {
    uint64_t start = end_;
    if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second == end_) start = free_.rbegin()->first;
    size_t extent = window_.extent_of(start);
    while (start + bytes > window_.begin_of(extent + 1)) start = window_.begin_of(++extent);
    const uint64_t from = std::max(start, end_);
    const uint64_t end = from + round_up(start + bytes - from, kGrowthUnit);
    window_.grow(from, end);
    insert(from, end - from);
    end_ = end;
  }

  void give_back(uint64_t offset, size_t bytes) {
    const std::lock_guard lock(mutex_);
    insert(offset, rounded(bytes));
  }

  void insert(uint64_t offset, size_t bytes) {
    auto range = free_.emplace(offset, bytes).first;
    const auto next = std::next(range);
    if (next != free_.end() && adjoin(*range, *next)) {
      range->second += next->second;
      free_.erase(next);
    }
    if (range == free_.begin()) return;
    const auto previous = std::prev(range);
    if (!adjoin(*previous, *range)) return;
    previous->second += range->second;
    free_.erase(range);
  }

  bool adjoin(const FreeRanges::value_type& one, const FreeRanges::value_type& next) const {
    return one.first + one.second == next.first && window_.extent_of(one.first) == window_.extent_of(next.first);
  }

  Window window_;
  std::mutex mutex_;
  FreeRanges free_;
  uint64_t end_ = 0;  // of the file
};

// A range of an arena; gives it back when it goes.
class Memory {
 public:
  Memory() = default;

  std::byte* data() const { return data_.get(); }
  size_t size() const { return data_.get_deleter().size; }
  uint64_t offset() const { return data_.get_deleter().offset; }  // what a peer needs to find it

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }

 private:
  friend class Arena;
  Memory(std::byte* data, Arena::GiveBack give_back) : data_(data, std::move(give_back)) {}

  std::unique_ptr<std::byte, Arena::GiveBack> data_;
};

inline Memory Arena::allocate(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t offset = take(rounded(bytes));
  try {
    return {window_.at(offset, rounded(bytes)), {shared_from_this(), offset, bytes}};
  } catch (...) {
    insert(offset, rounded(bytes));
    throw;
  }
}

}  // namespace lockstep::shm
