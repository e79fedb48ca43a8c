#include "lockstep/images.h"

#include <optional>

#include "lockstep/base/text.h"
#include "lockstep/data/images/encoded_image.h"
#include "lockstep/data/images/image_kernels.h"
#include "lockstep/data/loader/batch_memory.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::vector<std::int64_t> batch_sizes(std::size_t samples, const ImageShape& shape) {
  return {static_cast<std::int64_t>(samples), shape.channels, shape.height, shape.width};
}

[[noreturn]] void refuse_shape(const ImageSource& source, std::int64_t index, const ImageShape& shape,
                               const ImageShape& wanted) {
  throw DataError(
      {.what = concat("sample ", index, " of ", source.name(), " has ", shape.channels, " x ", shape.height, " x ",
                      shape.width, " values, the others ", wanted.channels, " x ", wanted.height, " x ", wanted.width),
       .here = source.origin(index),
       .likely = "images of different sizes in one dataset",
       .next = "bring them to one size with --augment resize:N or a crop of a size"});
}

// Adds the name of the sample to what a decoder or source says.
[[noreturn]] void rethrow_with_sample(const DataError& error, const ImageSource& source, std::int64_t index) {
  ErrorText text = error.text();
  text.what = concat("sample ", index, " of ", source.name(), ": ", text.what);
  text.here = source.origin(index);
  throw DataError(text);
}

}  // namespace

// What a worker needs while it makes a batch; reused by all batches of its thread.
struct ImageDataset::Worker {
  std::vector<std::uint8_t> file;
  DecodeScratch decoding;
  std::vector<float> other;  // of a mix
  StageTimes* times = nullptr;
};

ImageDataset::ImageDataset(std::shared_ptr<const ImageSource> source, ImageTransforms transforms)
    : source_(std::move(source)), transforms_(std::move(transforms)) {
  if (source_->size() <= 0)
    throw DataError({.what = concat(source_->name(), " has no images"), .likely = "an empty file, folder or split"});
  const bool sized = transforms_.height > 0 && transforms_.width > 0;
  const ImageShape stored =
      sized ? ImageShape{source_->channels(), transforms_.height, transforms_.width} : first_shape();
  shape_ = output_shape(transforms_, stored);
  // A crop without a size gives back what it was given.
  transforms_.height = transforms_.crop == Crop::kNone ? transforms_.height : shape_.height;
  transforms_.width = transforms_.crop == Crop::kNone ? transforms_.width : shape_.width;
  check_transforms(transforms_, shape_.channels);
}

ImageShape ImageDataset::first_shape() const {
  const ImageShape common = source_->common_shape();
  if (common.height > 0) return common;
  std::vector<std::uint8_t> scratch;
  const StoredImage first = source_->read(0, scratch);
  ImageShape shape = first.encoded ? encoded_shape(first.bytes, source_->origin(0)) : first.shape;
  shape.channels = source_->channels();
  return shape;
}

// Reads, decodes and transforms a sample; returns its label.
std::int64_t ImageDataset::write_image(std::int64_t index, SampleRandom& random, Worker& worker, float* into) const
    try {
  const std::optional<Stopwatch> watch = worker.times != nullptr ? std::make_optional<Stopwatch>() : std::nullopt;
  const StoredImage stored = source_->read(index, worker.file);
  const ImageShape shape = stored.encoded ? encoded_shape(stored.bytes, "") : stored.shape;
  Placement placement = draw_placement(transforms_, shape, random);
  if (shape.channels != shape_.channels || placement.height != shape_.height || placement.width != shape_.width)
    refuse_shape(*source_, index, shape, shape_);
  const ImageView image =
      stored.encoded ? decode_image(stored.bytes, placement, worker.decoding) : planar(stored.bytes.data(), shape);
  if (watch) worker.times->read += watch->seconds();
  apply_transforms(transforms_, image, placement, random, into);
  return stored.label;
} catch (const DataError& error) {
  if (!error.text().here.empty()) throw;
  rethrow_with_sample(error, *source_, index);
}

// A mix with a sample that is drawn from all, so that it depends neither on the batch nor on the ranks.
void ImageDataset::write_mixed(std::int64_t index, SampleRandom& random, Worker& worker, float* into,
                               float* target) const {
  std::fill_n(target, classes(), 0.F);
  const std::int64_t label = write_image(index, random, worker, into);
  if (transforms_.mixup == 0) {
    target[label] = 1;
    return;
  }
  const auto share = static_cast<float>(draw_share(transforms_.mixup, random));
  worker.other.resize(static_cast<std::size_t>(shape_.values()));
  const std::int64_t other = write_image(random.below(size()), random, worker, worker.other.data());
  mix_into(into, worker.other.data(), share, shape_.values());
  target[label] += share;
  target[other] += 1 - share;
}

Batch ImageDataset::assemble(const BatchRequest& request) const {
  static thread_local Worker worker;
  worker.times = source_->in_memory() ? nullptr : request.times;
  const auto samples = static_cast<std::int64_t>(request.indices.size());
  const bool soft = transforms_.soft_target();
  Batch batch{allocate_for_batch(request.memory, batch_sizes(request.indices.size(), shape_), torch::kFloat32),
              soft ? allocate_for_batch(request.memory, {samples, classes()}, torch::kFloat32)
                   : torch::empty({samples}, torch::kInt64)};
  const std::uint64_t epoch_seed = mix_seed(request.seed, static_cast<std::uint64_t>(request.epoch));
  auto* data = batch.data.data_ptr<float>();
  for (std::size_t i = 0; i < request.indices.size(); ++i, data += shape_.values()) {
    const std::int64_t index = request.indices[i];
    SampleRandom random(epoch_seed, index);
    if (soft)
      write_mixed(index, random, worker, data,
                  batch.target.data_ptr<float>() + static_cast<std::int64_t>(i) * classes());
    else
      batch.target.data_ptr<std::int64_t>()[i] = write_image(index, random, worker, data);
  }
  return batch;
}

}  // namespace lockstep
