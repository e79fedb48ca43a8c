#include "lockstep/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::uint64_t epoch_seed(std::uint64_t seed, std::int64_t epoch) {
  return mix_seed(seed, static_cast<std::uint64_t>(epoch));
}

class Sequential : public SampleOrder, public EpochOrder, public std::enable_shared_from_this<Sequential> {
 public:
  explicit Sequential(std::int64_t samples) : samples_(samples) {}
  std::int64_t samples() const override { return samples_; }
  std::shared_ptr<const EpochOrder> draw(std::uint64_t, std::int64_t) const override { return shared_from_this(); }
  void read(std::int64_t begin, std::span<std::int64_t> into) const override {
    std::iota(into.begin(), into.end(), begin);
  }

 private:
  std::int64_t samples_;
};

class Permutation : public EpochOrder {
 public:
  Permutation(std::int64_t samples, std::uint64_t seed)
      : places_(torch::randperm(samples, at::make_generator<at::CPUGeneratorImpl>(seed), torch::kInt64)) {}
  void read(std::int64_t begin, std::span<std::int64_t> into) const override {
    std::copy_n(places_.const_data_ptr<std::int64_t>() + begin, into.size(), into.begin());
  }

 private:
  torch::Tensor places_;
};

class Random : public SampleOrder {
 public:
  explicit Random(std::int64_t samples) : samples_(samples) {}
  std::int64_t samples() const override { return samples_; }
  std::shared_ptr<const EpochOrder> draw(std::uint64_t seed, std::int64_t epoch) const override {
    return std::make_shared<Permutation>(samples_, epoch_seed(seed, epoch));
  }

 private:
  std::int64_t samples_;
};

using Sums = std::shared_ptr<const std::vector<double>>;  // sums[i]: of the weights of samples 0..i

class WeightedEpoch : public EpochOrder {
 public:
  WeightedEpoch(Sums sums, std::uint64_t seed) : sums_(std::move(sums)), seed_(seed) {}
  void read(std::int64_t begin, std::span<std::int64_t> into) const override {
    for (std::int64_t& sample : into) sample = draw(begin++);
  }

 private:
  std::int64_t draw(std::int64_t place) const {
    const double at = SampleRandom(seed_, place).uniform() * sums_->back();
    return std::upper_bound(sums_->begin(), sums_->end(), at) - sums_->begin();
  }
  Sums sums_;
  std::uint64_t seed_;
};

class Weighted : public SampleOrder {
 public:
  Weighted(Sums sums, std::int64_t samples) : sums_(std::move(sums)), samples_(samples) {}
  std::int64_t samples() const override { return samples_; }
  std::shared_ptr<const EpochOrder> draw(std::uint64_t seed, std::int64_t epoch) const override {
    return std::make_shared<WeightedEpoch>(sums_, epoch_seed(seed, epoch));
  }

 private:
  Sums sums_;
  std::int64_t samples_;
};

// Shards in the order of one epoch: where each begins in the epoch, and where in the dataset.
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

class WindowedEpoch : public EpochOrder {
 public:
  WindowedEpoch(const std::vector<std::int64_t>& sizes, std::int64_t samples, std::int64_t window, std::uint64_t seed)
      : plan_(shuffle_shards(sizes, seed)), samples_(samples), window_(window), seed_(seed) {}

  void read(std::int64_t begin, std::span<std::int64_t> into) const override {
    for (std::int64_t& sample : into) sample = sample_of(shuffled(begin++));
  }

 private:
  std::int64_t shuffled(std::int64_t place) const {
    const std::int64_t window_begin = place / window_ * window_;
    const auto size = static_cast<std::uint64_t>(std::min(window_, samples_ - window_begin));
    const std::uint64_t key = mix_seed(seed_, static_cast<std::uint64_t>(window_begin));
    return window_begin +
           static_cast<std::int64_t>(permuted(static_cast<std::uint64_t>(place - window_begin), size, key));
  }
  std::int64_t sample_of(std::int64_t place) const {
    const auto after = std::upper_bound(plan_.epoch_begins.begin(), plan_.epoch_begins.end(), place);
    const auto shard = static_cast<std::size_t>(after - plan_.epoch_begins.begin()) - 1;
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
  std::shared_ptr<const EpochOrder> draw(std::uint64_t seed, std::int64_t epoch) const override {
    return std::make_shared<WindowedEpoch>(sizes_, samples_, window_, epoch_seed(seed, epoch));
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
