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

std::uint64_t epoch_seed(std::uint64_t seed, std::int64_t epoch) {
  return mix_seed(seed, static_cast<std::uint64_t>(epoch));
}

class Sequential : public SampleOrder {
 public:
  explicit Sequential(std::int64_t samples) : samples_(samples) {}
  std::int64_t samples() const override { return samples_; }
  EpochOrder draw(std::uint64_t, std::int64_t) const override {
    return [](std::int64_t begin, std::span<std::int64_t> into) { std::iota(into.begin(), into.end(), begin); };
  }

 private:
  std::int64_t samples_;
};

class Random : public SampleOrder {
 public:
  explicit Random(std::int64_t samples) : samples_(samples) {}
  std::int64_t samples() const override { return samples_; }
  EpochOrder draw(std::uint64_t seed, std::int64_t epoch) const override {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(epoch_seed(seed, epoch));
    return [order = torch::randperm(samples_, generator, torch::kInt64)](std::int64_t begin,
                                                                         std::span<std::int64_t> into) {
      std::copy_n(order.const_data_ptr<std::int64_t>() + begin, into.size(), into.begin());
    };
  }

 private:
  std::int64_t samples_;
};

// Draw i looks up its own uniform number in the running sums of the weights: sums[k - 1] <= number < sums[k] picks
// sample k with probability weights[k] / sum. Draws do not depend on each other, so any part can be read alone.
class Weighted : public SampleOrder {
 public:
  using Sums = std::shared_ptr<const std::vector<double>>;  // sums[i]: of the weights of samples 0..i

  Weighted(Sums sums, std::int64_t samples) : sums_(std::move(sums)), samples_(samples) {}
  std::int64_t samples() const override { return samples_; }
  EpochOrder draw(std::uint64_t seed, std::int64_t epoch) const override {
    return [sums = sums_, key = epoch_seed(seed, epoch)](std::int64_t begin, std::span<std::int64_t> into) {
      for (std::int64_t& sample : into) {
        const double number = SampleRandom(key, begin++).uniform() * sums->back();
        sample = std::upper_bound(sums->begin(), sums->end(), number) - sums->begin();
      }
    };
  }

 private:
  Sums sums_;
  std::int64_t samples_;
};

// Shards in the order of one epoch: the place in the epoch where each begins, and its first sample in the dataset.
struct ShardPlan {
  std::vector<std::int64_t> epoch_begins;
  std::vector<std::int64_t> dataset_begins;
};

ShardPlan shuffle_shards(const std::vector<std::int64_t>& sizes, std::uint64_t seed) {
  std::vector<std::int64_t> begins(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), begins.begin(), std::int64_t{0});
  ShardPlan plan;
  std::int64_t next = 0;
  for (std::size_t place = 0; place < sizes.size(); ++place) {
    const std::size_t shard = permuted(place, sizes.size(), seed);
    plan.epoch_begins.push_back(next);
    plan.dataset_begins.push_back(begins[shard]);
    next += sizes[shard];
  }
  return plan;
}

// Place p of the epoch -> sample, in two steps and without a table of samples:
// 1. Shuffle within the window of p: places [w, w + size) are permuted among themselves, keyed by seed, epoch and w.
// 2. Look the shuffled place up in the shards as they follow each other this epoch: the last shard that begins at or
//    before it, and the offset from there.
// Both steps are one to one, so every sample comes up once; a window lies in one shard, or in a few that follow each
// other, so the disk reads long runs.
class WindowedEpoch {
 public:
  WindowedEpoch(const std::vector<std::int64_t>& sizes, std::int64_t samples, std::int64_t window, std::uint64_t seed)
      : plan_(shuffle_shards(sizes, seed)), samples_(samples), window_(window), seed_(seed) {}

  void operator()(std::int64_t begin, std::span<std::int64_t> into) const {
    for (std::int64_t& sample : into) sample = sample_of(shuffled(begin++));
  }

 private:
  std::int64_t shuffled(std::int64_t place) const {
    const std::int64_t window_begin = place / window_ * window_;
    const std::int64_t size = std::min(window_, samples_ - window_begin);
    const std::uint64_t key = mix_seed(seed_, to_size(window_begin));
    return window_begin + static_cast<std::int64_t>(permuted(to_size(place - window_begin), to_size(size), key));
  }
  std::int64_t sample_of(std::int64_t place) const {
    const auto after = std::upper_bound(plan_.epoch_begins.begin(), plan_.epoch_begins.end(), place);
    const std::size_t shard = to_size(after - plan_.epoch_begins.begin()) - 1;
    return plan_.dataset_begins[shard] + place - plan_.epoch_begins[shard];
  }

  ShardPlan plan_;
  std::int64_t samples_;
  std::int64_t window_;
  std::uint64_t seed_;
};

class Windowed : public SampleOrder {
 public:
  Windowed(std::vector<std::int64_t> sizes, std::int64_t window)
      : sizes_(std::move(sizes)),
        samples_(std::accumulate(sizes_.begin(), sizes_.end(), std::int64_t{0})),
        window_(window) {}
  std::int64_t samples() const override { return samples_; }
  EpochOrder draw(std::uint64_t seed, std::int64_t epoch) const override {
    return WindowedEpoch(sizes_, samples_, window_, epoch_seed(seed, epoch));
  }

 private:
  std::vector<std::int64_t> sizes_;
  std::int64_t samples_;
  std::int64_t window_;
};

}  // namespace

std::shared_ptr<const SampleOrder> sequential_order(std::int64_t samples) {
  return std::make_shared<Sequential>(samples);
}

std::shared_ptr<const SampleOrder> random_order(std::int64_t samples) { return std::make_shared<Random>(samples); }

std::shared_ptr<const SampleOrder> weighted_order(const std::vector<double>& weights, std::int64_t samples) {
  auto sums = std::make_shared<std::vector<double>>();
  double sum = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0)
      throw UsageError({.what = concat("the weight of sample ", i, " is ", weights[i]), .next = "give weights >= 0"});
    sums->push_back(sum += weights[i]);
  }
  if (sum <= 0 || !std::isfinite(sum))
    throw UsageError({.what = concat("the weights of the samples add up to ", sum), .next = "give some that are > 0"});
  return std::make_shared<Weighted>(std::move(sums), samples);
}

std::shared_ptr<const SampleOrder> window_order(std::vector<std::int64_t> shard_sizes, std::int64_t window) {
  if (window < 1) throw UsageError({.what = concat("a window of ", window, " samples"), .next = "give at least 1"});
  return std::make_shared<Windowed>(std::move(shard_sizes), window);
}

}  // namespace lockstep
