// data/order.h: the order in which an epoch visits samples, a function of (seed, epoch) alone.
//
// Flow:    seed, epoch -> here -> data/sampler.h, which deals it out to the ranks
// Threads: const after construction
// Ranks:   no communication: every rank draws the same order
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace lockstep {

// One epoch's order; any part of it can be read without what lies before.
class EpochOrder {
 public:
  virtual ~EpochOrder() = default;
  // into[i] = the sample at place begin + i
  virtual void read(std::int64_t begin, std::span<std::int64_t> into) const = 0;
};

class SampleOrder {
 public:
  virtual ~SampleOrder() = default;
  virtual std::int64_t samples() const = 0;  // of an epoch
  virtual std::shared_ptr<const EpochOrder> draw(std::uint64_t seed, std::int64_t epoch) const = 0;
};

std::shared_ptr<const SampleOrder> sequential_order(std::int64_t samples);

// A permutation of all samples. Keeps 8 bytes a sample.
std::shared_ptr<const SampleOrder> random_order(std::int64_t samples);

// `samples` draws with replacement, sample i with probability weights[i] / sum. Throws UsageError: a weight that is
// negative or not finite, all weights zero.
std::shared_ptr<const SampleOrder> weighted_order(const std::vector<double>& weights, std::int64_t samples);

// For data on disk in shards: the shards in random order, cut into windows of `window` samples that are shuffled each. Reads
// stay within a window, so the disk sees long runs. Every sample once. Keeps a few bytes a shard. Throws UsageError: window < 1.
std::shared_ptr<const SampleOrder> window_order(std::vector<std::int64_t> shard_sizes, std::int64_t window);

}  // namespace lockstep
