// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/key_plan.h"

#include <algorithm>

#include "lockstep/base/cache_line.h"
#include "lockstep/model/parameters.h"
#include "lockstep/sampler.h"

namespace lockstep {
namespace {

constexpr int64_t kSliceElements = 65536;
constexpr int64_t kParts = 16;
constexpr int64_t kLeastPart = int64_t{256} << 10;  // bytes
constexpr int64_t kAlignment{kCacheLine};

// Every slice but the last of a server has a multiple of 64 rows, and so of 64 bytes whatever the dtype: the next one
// begins on a cache line without a gap.
void split_over_all(const Key& key, size_t number, std::vector<BlockLayout>& blocks) {
  const int64_t row = std::max<int64_t>(key.elements / key.rows, 1);
  const int64_t step = round_up(std::max<int64_t>(kSliceElements / row, 1), kAlignment);
  const int servers = to_int(blocks.size());
  for (int server = 0; BlockLayout & block : blocks) {
    const Range rows = even_part(key.rows, server++, servers);
    for (int64_t begin = rows.begin; begin < rows.end; begin += step)
      block.add(key, number, begin * row, std::min(step, rows.end - begin) * row);
  }
}

}  // namespace

Tensor KeySlice::in_block(const Tensor& block) const { return block.narrow(0, offset, bytes()).view(dtype); }

Tensor KeySlice::in_value(const Tensor& value) const { return dense_view(value.detach()).narrow(0, begin, count); }

int64_t BlockLayout::bytes() const {
  return slices_.empty() ? 0 : round_up(slices_.back().offset + slices_.back().bytes(), kAlignment);
}

void BlockLayout::add(const Key& key, size_t number, int64_t begin, int64_t count) {
  slices_.push_back(
      {.key = number, .begin = begin, .count = count, .offset = bytes(), .dtype = key.dtype, .trained = key.trained});
}

SliceRange BlockLayout::range_of(KeyRange keys) const {
  const auto place = [this](size_t key) -> size_t {
    return std::ranges::lower_bound(slices_, key, {}, &KeySlice::key) - slices_.begin();
  };
  return {place(keys.first), place(keys.last)};
}

std::span<const KeySlice> BlockLayout::slices_of(SliceRange range) const {
  return std::span(slices_).subspan(range.first, range.size());
}

std::vector<SliceRange> BlockLayout::parts_of(SliceRange range) const {
  const int64_t enough = std::max(bytes() / kParts, kLeastPart);
  std::vector<SliceRange> parts{{range.first, range.first}};
  int64_t bytes = 0;  // of the last part
  for (size_t slice = range.first; slice < range.last; ++slice) {
    if (bytes >= enough) {
      parts.push_back({slice, slice});
      bytes = 0;
    }
    parts.back().last = slice + 1;
    bytes += slices_[slice].bytes();
  }
  return parts;
}

Tensor BlockLayout::region_of(SliceRange range, const Tensor& block) const {
  const auto slices = slices_of(range);
  if (slices.empty()) return block.narrow(0, 0, 0);
  return block.narrow(0, slices.front().offset, slices.back().offset + slices.back().bytes() - slices.front().offset);
}

std::vector<BlockLayout> plan_keys(const std::vector<Key>& keys, size_t servers, int64_t split_above) {
  std::vector<BlockLayout> blocks(servers);
  for (size_t number = 0; const Key& key : keys) {
    if (key.elements >= split_above)
      split_over_all(key, number, blocks);
    else
      std::ranges::min_element(blocks, {}, &BlockLayout::bytes)->add(key, number, 0, key.elements);
    ++number;
  }
  return blocks;
}

}  // namespace lockstep
