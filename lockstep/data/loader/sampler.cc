// SPDX-License-Identifier: Apache-2.0
#include "lockstep/sampler.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::shared_ptr<const SampleOrder> order_for(const SamplerOptions& options) {
  if (options.order) return options.order;
  return options.shuffle ? random_order(options.samples) : sequential_order(options.samples);
}

std::int64_t batches(std::int64_t samples, std::int64_t batch_size) { return (samples + batch_size - 1) / batch_size; }

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

DistributedSampler::DistributedSampler(const SamplerOptions& options) : options_(options), order_(order_for(options)) {
  if (order_->samples() <= 0)
    throw UsageError({.what = "the dataset has no samples", .likely = "an empty file or split"});
  require_batch_for_ranks(options.batch_size, options.ranks);
  set_epoch(0);
}

std::int64_t DistributedSampler::steps_per_epoch() const { return batches(samples(), options_.batch_size); }

std::int64_t DistributedSampler::steps() const { return batches(samples() - first_sample_, options_.batch_size); }

std::int64_t DistributedSampler::samples_before(std::int64_t step) const {
  return std::min(first_sample_ + step * options_.batch_size, samples());
}

void DistributedSampler::set_epoch(std::int64_t epoch, std::int64_t first_sample) {
  if (first_sample < 0 || first_sample > samples())
    throw UsageError({.what = concat("an epoch of ", samples(), " samples can't continue at sample ", first_sample),
                      .likely = "a position that was saved with another dataset"});
  epoch_ = order_->draw(options_.seed, epoch);
  first_sample_ = first_sample;
}

std::vector<std::int64_t> DistributedSampler::part(std::int64_t step) const {
  const std::int64_t begin = samples_before(step);
  const Range mine = even_part(samples_before(step + 1) - begin, options_.rank, options_.ranks);
  std::vector<std::int64_t> indices(to_size(mine.size()));
  epoch_(begin + mine.begin, indices);
  return indices;
}

}  // namespace lockstep
