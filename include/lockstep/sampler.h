// SPDX-License-Identifier: Apache-2.0
// lockstep/sampler.h: the order of an epoch, and which of its samples each rank sees.
//
// Flow:    seed, epoch -> SampleOrder -> DistributedSampler -> lockstep/loader.h
// Owns:    an order owns its tables (random_order 8 bytes a sample, weighted_order too, window_order a few a shard)
// Threads: orders are const after construction; part() may be called from several threads between two set_epoch()
// Ranks:   no communication: every rank draws the same order and takes its part
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace lockstep {

// One epoch's order: into[i] = the sample at place begin + i. Any part can be read without what lies before it.
using EpochOrder = std::function<void(int64_t begin, std::span<int64_t> into)>;

// The order in which epochs visit samples.
struct SampleOrder {
  int64_t samples;                                               // of an epoch
  std::function<EpochOrder(uint64_t seed, int64_t epoch)> draw;  // that of an epoch; depends on nothing else
};

using SampleOrderPtr = std::shared_ptr<const SampleOrder>;

SampleOrderPtr sequential_order(int64_t samples);

// A permutation of all samples.
SampleOrderPtr random_order(int64_t samples);

// `samples` draws with replacement, sample i with probability weights[i] / sum. Throws UsageError: a weight that is
// negative or not finite, all weights zero.
SampleOrderPtr weighted_order(const std::vector<double>& weights, int64_t samples);

// For data on disk in shards: the shards in random order, cut into windows of `window` samples that are shuffled each.
// Reads stay within a window, so the disk sees long runs. Every sample once. Throws UsageError: window < 1.
SampleOrderPtr window_order(std::vector<int64_t> shard_sizes, int64_t window);

struct SamplerOptions {
  int64_t samples = 0;     // in the dataset
  int64_t batch_size = 1;  // global: over all ranks
  int rank = 0;
  int ranks = 1;
  uint64_t seed = 0;
  bool shuffle = true;     // random_order, else sequential_order
  SampleOrderPtr order{};  // replaces `samples` and `shuffle`
};

// An epoch's order is cut into global batches of batch_size; the last one takes what is left. A global batch is cut
// into one contiguous part per rank, whose sizes differ by at most one: the global batches are the same for any number
// of ranks.
class DistributedSampler {
 public:
  explicit DistributedSampler(const SamplerOptions& options);  // throws UsageError: batch_size < ranks, no samples

  int64_t samples() const { return order_->samples; }
  int64_t steps_per_epoch() const;

  // The order of `epoch` without its first `first_sample` samples: those that all ranks together have had already, with
  // any number of ranks and any batch size. Steps count from there. Throws UsageError: a position outside of the epoch.
  void set_epoch(int64_t epoch, int64_t first_sample = 0);
  int64_t steps() const;                       // from first_sample on
  int64_t samples_before(int64_t step) const;  // of the epoch, over all ranks, with first_sample

  // This rank's part of the global batch of `step` (0 <= step < steps()); empty in a last batch that has fewer samples
  // than ranks.
  std::vector<int64_t> part(int64_t step) const;

 private:
  SamplerOptions options_;
  SampleOrderPtr order_;
  EpochOrder epoch_;
  int64_t first_sample_ = 0;
};

// Throws UsageError unless every rank can have a sample of a full batch.
void require_batch_for_ranks(int64_t batch_size, int ranks);

// Element range [begin, end) of `index` out of `parts` contiguous parts whose sizes differ by at most one.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};
Range even_part(int64_t total, int index, int parts);

}  // namespace lockstep
