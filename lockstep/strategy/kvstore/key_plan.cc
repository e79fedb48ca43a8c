#include "lockstep/strategy/kvstore/key_plan.h"

#include <algorithm>

#include "lockstep/data/sampler.h"

namespace lockstep {
namespace {

constexpr std::int64_t kAlignment = 64;  // bytes: a slice begins on a cache line

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void split_over_all(const Key& key, std::int64_t number, std::vector<BlockLayout>& blocks) {
  const std::int64_t row = key.elements / key.rows;
  for (std::size_t server = 0; server < blocks.size(); ++server) {
    const Range rows = even_part(key.rows, static_cast<int>(server), static_cast<int>(blocks.size()));
    if (rows.size() > 0) blocks[server].add(key, number, rows.begin * row, rows.size() * row);
  }
}

}  // namespace

torch::Tensor KeySlice::in(const torch::Tensor& block) const { return block.narrow(0, offset, bytes()).view(scalar_type()); }

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

std::span<const KeySlice> BlockLayout::slices_of(KeyRange range) const {
  const auto first = std::ranges::lower_bound(slices_, range.first, {}, &KeySlice::key);
  const auto last = std::ranges::lower_bound(slices_, range.last, {}, &KeySlice::key);
  return {first, last};
}

torch::Tensor BlockLayout::region_of(KeyRange range, const torch::Tensor& block) const {
  const auto slices = slices_of(range);
  if (slices.empty()) return block.narrow(0, 0, 0);
  return block.narrow(0, slices.front().offset, slices.back().offset + slices.back().bytes() - slices.front().offset);
}

std::vector<BlockLayout> plan_keys(const std::vector<Key>& keys, const KeyPlanOptions& options) {
  std::vector<BlockLayout> blocks(static_cast<std::size_t>(options.servers));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto number = static_cast<std::int64_t>(i);
    if (blocks.size() > 1 && keys[i].elements >= options.split_above)
      split_over_all(keys[i], number, blocks);
    else
      std::ranges::min_element(blocks, {}, &BlockLayout::bytes)->add(keys[i], number, 0, keys[i].elements);
  }
  return blocks;
}

}  // namespace lockstep
