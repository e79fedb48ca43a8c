// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/memory/arena.h"

#include <algorithm>
#include <utility>

#include "lockstep/collective/shm/memory/control_block.h"

namespace lockstep::shm {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kGrowthUnit = std::size_t{1} << 20;

// Large arrays start on a page of their own, small ones on a cache line.
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

// By what is missing behind a free range at the end, in whole units.
void Arena::grow(std::size_t bytes) {
  std::size_t missing = bytes;
  if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second == taken_) missing -= free_.rbegin()->second;
  const std::size_t end = taken_ + round_up(missing, kGrowthUnit);
  window_.grow(taken_, end);
  insert(taken_, end - taken_);
  taken_ = end;
}

void Arena::give_back(std::uint64_t offset, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  insert(offset, rounded(bytes));
}

void Arena::insert(std::uint64_t offset, std::size_t bytes) {
  auto range = free_.emplace(offset, bytes).first;
  const auto next = std::next(range);
  if (next != free_.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range == free_.begin()) return;
  const auto previous = std::prev(range);
  if (previous->first + previous->second != range->first) return;
  previous->second += range->second;
  free_.erase(range);
}

std::size_t Arena::bytes_taken() const {
  const std::lock_guard lock(mutex_);
  return taken_;
}

}  // namespace lockstep::shm
