// data/image_dataset.h: images out of a source, transformed and normalised while the batch is written.
//
// Flow:    ImageSource -> decode (JPEG, PNG) -> image_transforms -> the batch's memory, one pass per sample
// Owns:    the source, shared
// Threads: const after construction
#pragma once

#include <memory>

#include "lockstep/data/dataset.h"
#include "lockstep/data/image_source.h"
#include "lockstep/data/image_transforms.h"

namespace lockstep {

class ImageDataset : public Dataset {
 public:
  // Throws UsageError (transforms that contradict each other or the images), DataError (no images; without a size in the
  // transforms the first image has to be readable, for its size is everybody's).
  ImageDataset(std::shared_ptr<const ImageSource> source, ImageTransforms transforms);

  std::string name() const override { return source_->name(); }
  std::int64_t size() const override { return source_->size(); }
  std::int64_t classes() const { return source_->classes(); }
  const ImageSource& source() const { return *source_; }
  const ImageTransforms& transforms() const { return transforms_; }
  const ImageShape& sample_shape() const { return shape_; }

  // data: (B, C, H, W) float32; target: (B) int64, with mixup or one-hot (B, classes) float32.
  Batch make_batch(std::span<const std::int64_t> indices) const override { return assemble({.indices = indices}); }
  Batch assemble(const BatchRequest& request) const override;
  void will_read(std::span<const std::int64_t> indices) const override { source_->will_read(indices); }
  std::shared_ptr<const SampleOrder> shuffled_order() const override { return source_->shuffled_order(); }

 private:
  struct Worker;
  ImageShape first_shape() const;
  std::int64_t write_image(std::int64_t index, SampleRandom& random, Worker& worker, float* into) const;
  void write_mixed(std::int64_t index, SampleRandom& random, Worker& worker, float* into, float* target) const;

  std::shared_ptr<const ImageSource> source_;
  ImageTransforms transforms_;
  ImageShape shape_;  // of a sample in a batch
};

}  // namespace lockstep
