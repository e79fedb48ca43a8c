// lockstep/dataset.h: what a dataset is: a number of samples, and a way to make a batch of any of them.
//
// Flow:    files -> a Dataset -> lockstep/loader.h
// Owns:    a dataset owns its samples
// Threads: make_batch() and assemble() are const, and the loader's workers call them at the same time
// Ranks:   every rank has the same dataset; the sampler decides who takes what
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace lockstep {

class BatchMemory;
class SampleOrder;

// A rank's part of a global batch. data: (B, ...), float for images and tables, int64 for tokens; target: (B) int64
// where the dataset has classes. B may be 0: such a rank still takes part.
struct Batch {
  torch::Tensor data;
  torch::Tensor target;
  std::int64_t size() const { return target.defined() ? target.size(0) : 0; }
};

// Seconds of one thread, where a batch's time goes.
struct StageTimes {
  double read = 0;      // from the disk or the page cache, with checksums and decoding
  double assemble = 0;  // transforms, and the writing of the batch
};

// What the loader asks a dataset for.
struct BatchRequest {
  std::span<const std::int64_t> indices;  // each in [0, size())
  std::uint64_t seed = 0;  // with the epoch and a sample's index it decides what is random about the sample
  std::int64_t epoch = 0;
  BatchMemory* memory = nullptr;  // where the batch's tensors come from; none: fresh ones
  StageTimes* times = nullptr;    // added to, where there is one
};

// A dataset of your own overrides name, size and make_batch; the loader's workers, order, skipping and resuming then
// work for it as they do for lockstep's.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::string name() const = 0;
  virtual std::int64_t size() const = 0;

  // The samples at these places, in this order, on the CPU. Each index is in [0, size()).
  // Throws DataError naming file and sample: one that can't be read or decoded, or is of another shape than the others.
  virtual Batch make_batch(std::span<const std::int64_t> indices) const = 0;

  // The same, for a dataset that reuses memory or draws augmentation from (seed, epoch, index).
  virtual Batch assemble(const BatchRequest& request) const { return make_batch(request.indices); }

  // These samples are about to be asked for: a dataset on disk starts reading them now, all at once. Does not block.
  virtual void will_read(std::span<const std::int64_t> indices) const { static_cast<void>(indices); }

  // How this dataset is best shuffled (lockstep/sampler.h); null: any order is as good as another.
  virtual std::shared_ptr<const SampleOrder> shuffled_order() const { return nullptr; }
};

}  // namespace lockstep
