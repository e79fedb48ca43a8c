// SPDX-License-Identifier: Apache-2.0
#include <iterator>
#include <optional>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/images/encoded_image.h"
#include "lockstep/data/images/image_transforms.h"
#include "lockstep/data/loader/batch_memory.h"
#include "lockstep/deadline.h"

namespace lockstep {
namespace {

DataError another_shape(const ImageShape& shape, const ImageShape& wanted) {
  const auto sizes = [](const ImageShape& s) { return concat(s.channels, " x ", s.height, " x ", s.width); };
  return DataError({.what = concat("it has ", sizes(shape), " values, the others ", sizes(wanted)),
                    .likely = "images of different sizes in one dataset",
                    .next = "give them one size with --augment resize:N or a crop"});
}

}  // namespace

// Makes the samples of a batch on one thread, whose batches all reuse its memory.
class ImageDataset::Worker {
 public:
  void begin(const ImageDataset& dataset, double* read_seconds) {
    dataset_ = &dataset;
    read_seconds_ = read_seconds;
  }

  // Reads, decodes and transforms a sample; returns its label. Adds the sample to the error of a decoder or source.
  int64_t write_image(int64_t index, SampleRandom& random, float* into) {
    try {
      return read_and_transform(index, random, into);
    } catch (const DataError& error) {
      const ImageSource& source = *dataset_->source_;
      ErrorText text = error.text();
      text.what = concat("sample ", index, " of ", source.name(), ": ", text.what);
      text.here = source.origin(index);
      if (text.next.empty()) text.next = "repair it, or skip such samples with --skip-bad N (skip_bad)";
      throw DataError(text);
    }
  }

  // A mix with another sample, drawn from the whole dataset so that it depends neither on the batch nor on the ranks.
  // target: (classes) floats.
  void write_mixed(int64_t index, SampleRandom& random, float* into, float* target) {
    std::fill_n(target, dataset_->classes(), 0.F);
    const int64_t label = write_image(index, random, into);
    const double mixup = dataset_->transforms_.mixup;
    if (mixup == 0) {
      target[label] = 1;
      return;
    }
    const auto share = static_cast<float>(draw_share(mixup, random));
    other_.resize(to_size(dataset_->shape_.values()));
    const int64_t other = write_image(random.below(dataset_->size()), random, other_.data());
    mix_into(into, other_.data(), share, dataset_->shape_.values());
    target[label] += share;
    target[other] += 1 - share;
  }

 private:
  int64_t read_and_transform(int64_t index, SampleRandom& random, float* into) {
    const std::optional<Stopwatch> watch = read_seconds_ != nullptr ? std::make_optional<Stopwatch>() : std::nullopt;
    const ImageTransforms& transforms = dataset_->transforms_;
    const ImageShape& wanted = dataset_->shape_;
    const StoredImage stored = dataset_->source_->read(index, file_);
    const ImageShape shape = stored.encoded ? encoded_shape(stored.bytes, "") : stored.shape;
    Placement placement = draw_placement(transforms, shape, random);
    if (ImageShape{shape.channels, placement.height, placement.width} != wanted) throw another_shape(shape, wanted);
    const ImageView image =
        stored.encoded ? decode_image(stored.bytes, placement, decoding_) : planar(stored.bytes.data(), shape);
    if (watch) *read_seconds_ += watch->seconds();
    apply_transforms(transforms, image, placement, random, into);
    return stored.label;
  }

  const ImageDataset* dataset_ = nullptr;
  double* read_seconds_ = nullptr;
  Bytes file_;
  DecodeScratch decoding_;
  std::vector<float> other_;  // the other image of a mix
};

ImageDataset::ImageDataset(ImageSourcePtr source, ImageTransforms transforms)
    : source_(std::move(source)), transforms_(std::move(transforms)) {
  if (source_->size() <= 0)
    throw DataError({.what = concat(source_->name(), " has no images"), .likely = "an empty file, folder or split"});
  const bool sized = transforms_.height > 0 && transforms_.width > 0;
  shape_ = output_shape(transforms_, sized ? source_->common_shape() : first_shape());
  // Every crop has a size from here on: its own, or that of the stored images.
  transforms_.height = transforms_.crop == Crop::kNone ? transforms_.height : shape_.height;
  transforms_.width = transforms_.crop == Crop::kNone ? transforms_.width : shape_.width;
  check_transforms(transforms_, shape_.channels);
}

ImageShape ImageDataset::first_shape() const {
  const ImageShape common = source_->common_shape();
  if (common.height > 0) return common;
  Bytes scratch;
  const StoredImage first = source_->read(0, scratch);
  ImageShape shape = first.encoded ? encoded_shape(first.bytes, source_->origin(0)) : first.shape;
  shape.channels = common.channels;
  return shape;
}

Batch ImageDataset::assemble(const BatchRequest& request) const {
  static thread_local Worker worker;
  worker.begin(*this, source_->in_memory() ? nullptr : request.read_seconds);
  const auto samples = std::ssize(request.indices);
  const bool soft = transforms_.soft_target();
  Batch batch{
      allocate_for_batch(request.memory, {samples, shape_.channels, shape_.height, shape_.width}, torch::kFloat32),
      soft ? allocate_for_batch(request.memory, {samples, classes()}, torch::kFloat32)
           : torch::empty({samples}, torch::kInt64)};
  const uint64_t epoch_seed = mix_seed(request.seed, request.epoch);
  auto* data = batch.data.data_ptr<float>();
  auto* mixed = soft ? batch.target.data_ptr<float>() : nullptr;
  auto* label = soft ? nullptr : batch.target.data_ptr<int64_t>();
  for (const int64_t index : request.indices) {
    SampleRandom random(epoch_seed, index);
    if (soft)
      worker.write_mixed(index, random, data, mixed);
    else
      *label++ = worker.write_image(index, random, data);
    data += shape_.values();
    mixed += soft ? classes() : 0;
  }
  return batch;
}

}  // namespace lockstep
