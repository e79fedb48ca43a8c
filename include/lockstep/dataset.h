// SPDX-License-Identifier: Apache-2.0
// lockstep/dataset.h: what a dataset is: a number of samples, and a way to make a batch of any of them.
//
// Flow:    files -> a Dataset -> lockstep/loader.h
// Owns:    a dataset owns its samples
// Threads: make_batch() and assemble() are const; the loader's workers call them at the same time
// Ranks:   every rank has the same dataset; the sampler decides which samples each rank takes
#pragma once

#include <memory>
#include <span>

#include "lockstep/batch.h"

namespace lockstep {

using Indices = std::span<const int64_t>;  // of samples

class BatchMemory;
struct SampleOrder;

// A batch that the loader asks a dataset for.
struct BatchRequest {
  Indices indices;    // each in [0, size())
  uint64_t seed = 0;  // random choices about a sample are a function of seed, epoch and the sample's index
  int64_t epoch = 0;
  BatchMemory* memory = nullptr;  // where the batch's tensors are allocated; null: by torch
  // Seconds of reading, with checksums and decoding, are added here; null: not measured.
  double* read_seconds = nullptr;
};

// For a dataset of your own override name, size and make_batch; the loader's workers, order, skipping and resuming then
// work for it as they do for lockstep's datasets.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::string name() const = 0;
  virtual int64_t size() const = 0;

  // Targets are in [0, classes()). 0: they are not classes, or unknown.
  virtual int64_t classes() const { return 0; }

  // The samples with these indices, in this order, on the CPU. Each index is in [0, size()).
  // Throws DataError naming file and sample: it can't be read or decoded, or its shape differs from the others'.
  virtual Batch make_batch(Indices indices) const = 0;

  // The same, for a dataset that reuses memory or draws augmentation from (seed, epoch, index).
  virtual Batch assemble(const BatchRequest& request) const { return make_batch(request.indices); }

  // Announces samples that will be asked for soon: a dataset on disk starts reading all of them. Does not block.
  virtual void will_read(Indices indices) const { static_cast<void>(indices); }

  // The order in which this dataset is best shuffled (lockstep/sampler.h); null: any order is as good as another.
  virtual std::shared_ptr<const SampleOrder> shuffled_order() const { return nullptr; }
};

// A dataset that makes its batches in assemble() alone.
class AssembledDataset : public Dataset {
 public:
  Batch make_batch(Indices indices) const override { return assemble({.indices = indices}); }
  Batch assemble(const BatchRequest& request) const override = 0;
};

using DatasetPtr = std::shared_ptr<const Dataset>;

// Facts about the data of a training, which other data has to follow. A checkpoint keeps them.
struct DataFacts {
  std::vector<std::string>
      classes{};  // their names, in the order of their numbers; empty: numbers are all that is known
  std::vector<std::string> columns{};       // of a table, without the target; empty: it has no names
  std::vector<double> mean{}, deviation{};  // by which its columns are normalised
  bool operator==(const DataFacts&) const = default;
};

struct Datasets {
  DatasetPtr train;
  DatasetPtr validation;  // null: no validation
  DataFacts facts{};
};

}  // namespace lockstep
