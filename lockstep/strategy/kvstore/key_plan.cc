#include "lockstep/strategy/kvstore/key_plan.h"

#include <algorithm>

#include "lockstep/base/cache_line.h"
#include "lockstep/sampler.h"

namespace lockstep {
namespace {

constexpr std::int64_t kSliceElements = 65536;

std::int64_t aligned(std::int64_t bytes) { return round_up<std::int64_t>(bytes, kCacheLine); }

// Of as many rows that every slice ends where the next one may begin, whatever the dtype.
std::int64_t rows_of_slice(std::int64_t row) { return aligned(std::max<std::int64_t>(kSliceElements / row, 1)); }

void split_over_all(const Key& key, std::int64_t number, std::vector<BlockLayout>& blocks) {
  const std::int64_t row = std::max<std::int64_t>(key.elements / key.rows, 1);
  const std::int64_t step = rows_of_slice(row);
  for (std::size_t server = 0; server < blocks.size(); ++server) {
    const Range rows = even_part(key.rows, static_cast<int>(server), static_cast<int>(blocks.size()));
    for (std::int64_t begin = rows.begin; begin < rows.end; begin += step)
      blocks[server].add(key, number, begin * row, std::min(step, rows.end - begin) * row);
  }
}

}  // namespace

torch::Tensor KeySlice::in(const torch::Tensor& block) const {
  return block.narrow(0, offset, bytes()).view(scalar_type());
}

BlockLayout::BlockLayout(std::vector<KeySlice> slices) : slices_(std::move(slices)) {
  if (!slices_.empty()) bytes_ = aligned(slices_.back().offset + slices_.back().bytes());
}

void BlockLayout::add(const Key& key, std::int64_t number, std::int64_t begin, std::int64_t count) {
  slices_.push_back({.key = number,
                     .begin = begin,
                     .count = count,
                     .offset = bytes_,
                     .dtype = static_cast<std::int64_t>(key.dtype),
                     .trained = key.trained ? 1 : 0});
  bytes_ = aligned(bytes_ + slices_.back().bytes());
}

SliceRange BlockLayout::range_of(KeyRange keys) const {
  const auto first = std::ranges::lower_bound(slices_, keys.first, {}, &KeySlice::key);
  const auto last = std::ranges::lower_bound(slices_, keys.last, {}, &KeySlice::key);
  return {first - slices_.begin(), last - slices_.begin()};
}

std::span<const KeySlice> BlockLayout::slices_of(SliceRange range) const {
  return std::span(slices_).subspan(static_cast<std::size_t>(range.first), static_cast<std::size_t>(range.size()));
}

std::vector<SliceRange> BlockLayout::parts_of(SliceRange range, std::int64_t bytes) const {
  std::vector<SliceRange> parts{{range.first, range.first}};
  std::int64_t so_far = 0;
  for (std::int64_t slice = range.first; slice < range.last; ++slice) {
    if (so_far >= bytes) {
      parts.push_back({slice, slice});
      so_far = 0;
    }
    parts.back().last = slice + 1;
    so_far += slices_[static_cast<std::size_t>(slice)].bytes();
  }
  return parts;
}

torch::Tensor BlockLayout::region_of(SliceRange range, const torch::Tensor& block) const {
  const auto slices = slices_of(range);
  if (slices.empty()) return block.narrow(0, 0, 0);
  return block.narrow(0, slices.front().offset, slices.back().offset + slices.back().bytes() - slices.front().offset);
}

std::vector<BlockLayout> plan_keys(const std::vector<Key>& keys, const KeyPlanOptions& options) {
  std::vector<BlockLayout> blocks(static_cast<std::size_t>(options.servers));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto number = static_cast<std::int64_t>(i);
    if (keys[i].elements >= options.split_above)
      split_over_all(keys[i], number, blocks);
    else
      std::ranges::min_element(blocks, {}, &BlockLayout::bytes)->add(keys[i], number, 0, keys[i].elements);
  }
  return blocks;
}

}  // namespace lockstep
