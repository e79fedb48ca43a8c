#include "lockstep/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

// SplitMix64 (Steele, Lea and Flood, 2014): neighbouring epochs and seeds get unrelated generators.
std::uint64_t mix(std::uint64_t seed, std::uint64_t epoch) {
  std::uint64_t z = seed + (epoch + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

std::vector<std::int64_t> permutation(std::int64_t size, std::uint64_t seed) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const torch::Tensor order = torch::randperm(size, generator, torch::kInt64);
  return {order.data_ptr<std::int64_t>(), order.data_ptr<std::int64_t>() + size};
}

}  // namespace

Range even_part(std::int64_t total, int index, int parts) {
  return {total * index / parts, total * (index + 1) / parts};
}

void require_batch_for_ranks(std::int64_t batch_size, int ranks) {
  if (batch_size < ranks)
    throw UsageError({.what = concat("--batch-size ", batch_size, " is smaller than the number of ranks, ", ranks),
                      .likely = "--batch-size counts the samples of all ranks together",
                      .next = "give a larger batch, or start fewer ranks"});
}

DistributedSampler::DistributedSampler(const SamplerOptions& options)
    : options_(options), order_(static_cast<std::size_t>(options.samples)) {
  if (options.samples <= 0)
    throw UsageError({.what = "the dataset has no samples", .likely = "an empty file or split"});
  require_batch_for_ranks(options.batch_size, options.ranks);
  std::iota(order_.begin(), order_.end(), std::int64_t{0});
}

std::int64_t DistributedSampler::steps_per_epoch() const {
  return (options_.samples + options_.batch_size - 1) / options_.batch_size;
}

void DistributedSampler::set_epoch(std::int64_t epoch) {
  if (options_.shuffle) order_ = permutation(options_.samples, mix(options_.seed, static_cast<std::uint64_t>(epoch)));
}

std::span<const std::int64_t> DistributedSampler::part(std::int64_t step) const {
  const std::int64_t begin = step * options_.batch_size;
  const std::int64_t in_batch = std::min(options_.batch_size, options_.samples - begin);
  const Range mine = even_part(in_batch, options_.rank, options_.ranks);
  return std::span(order_).subspan(static_cast<std::size_t>(begin + mine.begin), static_cast<std::size_t>(mine.size()));
}

}  // namespace lockstep
