// data/memory_images.h: images of one size that lie in memory as bytes.
//
// Owns:    the bytes and the labels
// Threads: const after construction
#pragma once

#include <torch/types.h>

#include "lockstep/data/image_source.h"

namespace lockstep {

class MemoryImages : public ImageSource {
 public:
  // images: (N, H, W) or (N, C, H, W) uint8; labels: (N), any whole-number dtype, in [0, classes). `origin` names the file.
  // Throws DataError naming what does not fit.
  MemoryImages(std::string name, const torch::Tensor& images, const torch::Tensor& labels, std::int64_t classes,
               std::string origin);

  std::string name() const override { return name_; }
  std::int64_t size() const override { return images_.size(0); }
  std::int64_t channels() const override { return shape_.channels; }
  std::int64_t classes() const override { return classes_; }
  ImageShape common_shape() const override { return shape_; }
  bool in_memory() const override { return true; }
  StoredImage read(std::int64_t index, std::vector<std::uint8_t>& scratch) const override;
  std::string origin(std::int64_t index) const override;

  const torch::Tensor& images() const { return images_; }  // (N, C, H, W) uint8
  const torch::Tensor& labels() const { return labels_; }  // (N) int64

 private:
  std::string name_;
  torch::Tensor images_;
  torch::Tensor labels_;
  std::int64_t classes_;
  std::string origin_;
  ImageShape shape_;
  const std::uint8_t* pixels_;
  const std::int64_t* label_;
};

}  // namespace lockstep
