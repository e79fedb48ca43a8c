// data/loader.h: this rank's batches of an epoch, one after another.
//
// Flow:    Dataset + DistributedSampler -> here -> the training loop
// Owns:    the dataset and the sampler
// Threads: one thread
// Ranks:   no communication; every rank gets the same number of batches per epoch
#pragma once

#include <iterator>
#include <memory>
#include <utility>

#include "lockstep/collective/world.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"

namespace lockstep {

struct LoaderOptions {
  std::int64_t batch_size = 1;  // global: over all ranks
  std::uint64_t seed = 0;
  bool shuffle = true;
};

class Loader {
 public:
  Loader(const World& world, std::shared_ptr<const Dataset> dataset, const LoaderOptions& options);

  const Dataset& dataset() const { return *dataset_; }
  std::int64_t steps_per_epoch() const { return sampler_.steps_per_epoch(); }

  class Iterator;
  // The batches of an epoch from `first_step` on, for a range-for; on the world's device.
  // Starting another epoch ends this one.
  struct Epoch {
    Loader* loader;
    std::int64_t first_step;
    Iterator begin() const;
    std::default_sentinel_t end() const { return {}; }
  };
  Epoch epoch(std::int64_t epoch, std::int64_t first_step = 0);

 private:
  Batch load(std::int64_t step) const;

  torch::Device device_;
  std::shared_ptr<const Dataset> dataset_;
  DistributedSampler sampler_;
};

class Loader::Iterator {
 public:
  Iterator(const Loader& loader, std::int64_t step) : loader_(&loader), step_(step) { load(); }
  Batch& operator*() { return batch_; }
  Iterator& operator++() {
    ++step_;
    load();
    return *this;
  }
  bool operator==(std::default_sentinel_t) const { return step_ >= loader_->steps_per_epoch(); }

 private:
  void load() {
    if (step_ < loader_->steps_per_epoch()) batch_ = loader_->load(step_);
  }

  const Loader* loader_;
  std::int64_t step_;
  Batch batch_;
};

template <class D>
Loader make_loader(const World& world, D dataset, const LoaderOptions& options) {
  return Loader(world, std::make_shared<const D>(std::move(dataset)), options);
}

}  // namespace lockstep
