// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/memory/arena.h"

#include <algorithm>

#include "lockstep/collective/shm/memory/control_block.h"

namespace lockstep::shm {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kGrowthUnit = std::size_t{1} << 20;

// Arrays start on a cache line; large ones take whole pages.
std::size_t rounded(std::size_t bytes) {
  const std::size_t some = std::max(bytes, std::size_t{1});
  return round_up(some, some >= kPage ? kPage : kCacheLine);
}

}  // namespace

Memory Arena::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t offset = take(rounded(bytes));
  try {
    return {window_.at(offset, rounded(bytes)), {shared_from_this(), offset, bytes}};
  } catch (...) {
    insert(offset, rounded(bytes));
    throw;
  }
}

std::uint64_t Arena::take(std::size_t bytes) {
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

Arena::FreeRanges::iterator Arena::best_fit(std::size_t bytes) {
  auto best = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range)
    if (range->second >= bytes && (best == free_.end() || range->second < best->second)) best = range;
  return best;
}

// Grows by what is missing behind a free range at the end, in whole units. What does not fit the extent of the window begins the
// next one that it fits: the file has a hole there, which takes no memory.
void Arena::grow(std::size_t bytes) {
  std::uint64_t start = end_;
  if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second == end_) start = free_.rbegin()->first;
  std::size_t extent = window_.extent_of(start);
  while (start + bytes > window_.begin_of(extent + 1)) start = window_.begin_of(++extent);
  const std::uint64_t from = std::max(start, end_);
  const std::uint64_t end = from + round_up(start + bytes - from, kGrowthUnit);
  window_.grow(from, end);
  taken_ += end - from;
  insert(from, end - from);
  end_ = end;
}

bool Arena::adjoin(const FreeRanges::value_type& one, const FreeRanges::value_type& next) const {
  return one.first + one.second == next.first && window_.extent_of(one.first) == window_.extent_of(next.first);
}

void Arena::give_back(std::uint64_t offset, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  insert(offset, rounded(bytes));
}

void Arena::insert(std::uint64_t offset, std::size_t bytes) {
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

std::size_t Arena::bytes_taken() const {
  const std::lock_guard lock(mutex_);
  return taken_;
}

}  // namespace lockstep::shm
