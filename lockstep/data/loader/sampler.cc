// SPDX-License-Identifier: Apache-2.0
#include "lockstep/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// A shard in the order of one epoch: its first place in the epoch, and its first sample in the dataset.
struct ShardRun {
  int64_t epoch_begin;
  int64_t dataset_begin;
};

std::vector<ShardRun> shuffle_shards(const std::vector<int64_t>& sizes, uint64_t seed) {
  std::vector<int64_t> begins(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), begins.begin(), int64_t{0});
  std::vector<ShardRun> runs;
  int64_t next = 0;
  for (size_t place = 0; place < sizes.size(); ++place) {
    const size_t shard = permuted(place, sizes.size(), seed);
    runs.push_back({next, begins[shard]});
    next += sizes[shard];
  }
  return runs;
}

// Place p of the epoch -> sample, in two steps and without a table of samples:
// 1. Shuffle within the window of p: places [w, w + size) are permuted among themselves, keyed by seed, epoch and w.
// 2. Look the shuffled place up in the shards as they follow each other this epoch: the last shard that begins at or
//    before it, and the offset from there.
// Both steps are one to one, so every sample comes up once; a window lies in one shard, or in a few that follow each
// other, so the disk reads long runs.
struct WindowedEpoch {
  std::vector<ShardRun> shards;
  int64_t samples;
  int64_t window;
  uint64_t seed;

  void operator()(int64_t begin, std::span<int64_t> into) const {
    for (int64_t& sample : into) sample = sample_of(shuffled(begin++));
  }
  int64_t shuffled(int64_t place) const {
    const int64_t window_begin = place / window * window;
    const int64_t size = std::min(window, samples - window_begin);
    const uint64_t key = mix_seed(seed, window_begin);
    return window_begin + static_cast<int64_t>(permuted(to_size(place - window_begin), to_size(size), key));
  }
  int64_t sample_of(int64_t place) const {
    const ShardRun& shard = *std::prev(std::ranges::upper_bound(shards, place, {}, &ShardRun::epoch_begin));
    return shard.dataset_begin + place - shard.epoch_begin;
  }
};

SampleOrderPtr order_for(const SamplerOptions& options) {
  if (options.order) return options.order;
  return options.shuffle ? random_order(options.samples) : sequential_order(options.samples);
}

int64_t batches(int64_t samples, int64_t batch_size) { return (samples + batch_size - 1) / batch_size; }

}  // namespace

SampleOrderPtr sequential_order(int64_t samples) {
  return std::make_shared<SampleOrder>(samples, [](uint64_t, int64_t) {
    return [](int64_t begin, std::span<int64_t> into) { std::iota(into.begin(), into.end(), begin); };
  });
}

SampleOrderPtr random_order(int64_t samples) {
  return std::make_shared<SampleOrder>(samples, [samples](uint64_t seed, int64_t epoch) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(mix_seed(seed, epoch));
    const torch::Tensor order = torch::randperm(samples, generator, torch::kInt64);
    return [order](int64_t begin, std::span<int64_t> into) {
      std::copy_n(order.const_data_ptr<int64_t>() + begin, into.size(), into.begin());
    };
  });
}

// Draw i looks up its own uniform number in the running sums of the weights: sums[k - 1] <= number < sums[k] picks
// sample k with probability weights[k] / sum. Draws do not depend on each other, so any part can be read alone.
SampleOrderPtr weighted_order(const std::vector<double>& weights, int64_t samples) {
  auto sums = std::make_shared<std::vector<double>>();
  double sum = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0)
      throw UsageError({.what = concat("the weight of sample ", i, " is ", weights[i]), .next = "give weights >= 0"});
    sums->push_back(sum += weights[i]);
  }
  if (sum <= 0 || !std::isfinite(sum))
    throw UsageError({.what = concat("the weights of the samples add up to ", sum), .next = "give some that are > 0"});
  return std::make_shared<SampleOrder>(samples, [sums](uint64_t seed, int64_t epoch) {
    return [sums, key = mix_seed(seed, epoch)](int64_t begin, std::span<int64_t> into) {
      for (int64_t& sample : into) {
        const double number = SampleRandom(key, begin++).uniform() * sums->back();
        sample = std::ranges::upper_bound(*sums, number) - sums->begin();
      }
    };
  });
}

SampleOrderPtr window_order(std::vector<int64_t> shard_sizes, int64_t window) {
  if (window < 1) throw UsageError({.what = concat("a window of ", window, " samples"), .next = "give at least 1"});
  const int64_t samples = std::accumulate(shard_sizes.begin(), shard_sizes.end(), int64_t{0});
  return std::make_shared<SampleOrder>(samples,
                                       [sizes = std::move(shard_sizes), samples, window](uint64_t seed, int64_t epoch) {
                                         const uint64_t key = mix_seed(seed, epoch);
                                         return WindowedEpoch{shuffle_shards(sizes, key), samples, window, key};
                                       });
}

Range even_part(int64_t total, int index, int parts) { return {total * index / parts, total * (index + 1) / parts}; }

void require_batch_for_ranks(int64_t batch_size, int ranks) {
  if (batch_size < ranks)
    throw UsageError({.what = concat("--batch-size ", batch_size, " is smaller than the number of ranks, ", ranks),
                      .likely = "--batch-size counts the samples of all ranks together",
                      .next = "give a larger batch, or start fewer ranks"});
}

DistributedSampler::DistributedSampler(const SamplerOptions& options) : options_(options), order_(order_for(options)) {
  if (order_->samples <= 0)
    throw UsageError({.what = "the dataset has no samples", .likely = "an empty file or split"});
  require_batch_for_ranks(options.batch_size, options.ranks);
  set_epoch(0);
}

int64_t DistributedSampler::steps_per_epoch() const { return batches(samples(), options_.batch_size); }

int64_t DistributedSampler::steps() const { return batches(samples() - first_sample_, options_.batch_size); }

int64_t DistributedSampler::samples_before(int64_t step) const {
  return std::min(first_sample_ + step * options_.batch_size, samples());
}

void DistributedSampler::set_epoch(int64_t epoch, int64_t first_sample) {
  if (first_sample < 0 || first_sample > samples())
    throw UsageError({.what = concat("an epoch of ", samples(), " samples can't continue at sample ", first_sample),
                      .likely = "a position that was saved with another dataset"});
  epoch_ = order_->draw(options_.seed, epoch);
  first_sample_ = first_sample;
}

std::vector<int64_t> DistributedSampler::part(int64_t step) const {
  const int64_t begin = samples_before(step);
  const Range mine = even_part(samples_before(step + 1) - begin, options_.rank, options_.ranks);
  std::vector<int64_t> indices(to_size(mine.size()));
  epoch_(begin + mine.begin, indices);
  return indices;
}

}  // namespace lockstep
