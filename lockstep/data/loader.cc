#include "lockstep/data/loader.h"

namespace lockstep {

Loader::Loader(const World& world, std::shared_ptr<const Dataset> dataset, const LoaderOptions& options)
    : device_(world.device()),
      dataset_(std::move(dataset)),
      sampler_({.samples = dataset_->size(),
                .batch_size = options.batch_size,
                .rank = world.rank(),
                .ranks = world.size(),
                .seed = options.seed,
                .shuffle = options.shuffle}) {}

Loader::Epoch Loader::epoch(std::int64_t epoch, std::int64_t first_step) {
  sampler_.set_epoch(epoch);
  return {this, first_step};
}

Loader::Iterator Loader::Epoch::begin() const { return {*loader, first_step}; }

Batch Loader::load(std::int64_t step) const {
  Batch batch = dataset_->make_batch(sampler_.part(step));
  return {batch.data.to(device_), batch.target.to(device_)};
}

}  // namespace lockstep
