// data/sampler.h: which samples a rank sees: every sample once per epoch over all ranks, in an order of its own each
// epoch.
//
// Flow:    seed, epoch -> here -> data/loader.h
// Threads: const after construction
// Ranks:   no communication: every rank computes the same order and takes its part
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep {

struct SamplerOptions {
  std::int64_t samples = 0;     // in the dataset
  std::int64_t batch_size = 1;  // global: over all ranks
  int rank = 0;
  int ranks = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;
};

// An epoch is one permutation of the dataset, drawn from (seed, epoch), cut into global batches of batch_size; the last
// one takes what is left. A global batch is cut into one contiguous part per rank, whose sizes differ by at most one:
// the same global batches whatever the number of ranks. S1.
class DistributedSampler {
 public:
  explicit DistributedSampler(const SamplerOptions& options);  // throws UsageError: batch_size < ranks, no samples

  std::int64_t steps_per_epoch() const;
  void set_epoch(std::int64_t epoch);

  // This rank's part of the global batch of `step` (0 <= step < steps_per_epoch()); empty in a last batch that has
  // fewer samples than ranks. Valid until set_epoch.
  std::span<const std::int64_t> part(std::int64_t step) const;

 private:
  SamplerOptions options_;
  std::vector<std::int64_t> order_;
};

// Throws UsageError unless every rank can have a sample of a full batch.
void require_batch_for_ranks(std::int64_t batch_size, int ranks);

// Element range [begin, end) of `index` out of `parts` contiguous parts whose sizes differ by at most one.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};
Range even_part(std::int64_t total, int index, int parts);

}  // namespace lockstep
