// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/formats/readers.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Of the training images scaled to [0, 1]; a test computes them again.
constexpr float kMean = 0.2860F;
constexpr float kDeviation = 0.3530F;

std::filesystem::path find_file(const std::filesystem::path& folder, const std::string& name) {
  const auto plain = folder / name;
  return std::filesystem::exists(plain) ? plain : folder / (name + ".gz");
}

void check_images(const torch::Tensor& images, const std::filesystem::path& file) {
  if (images.dim() == 3 && images.size(1) == 28 && images.size(2) == 28 && images.size(0) > 0) return;
  throw DataError({.what = concat(file.filename().string(), " holds shape ", images.sizes(), ", not (N, 28, 28)"),
                   .here = concat(file.string(), ", offset 4"),
                   .likely = "another dataset, or labels where images belong",
                   .next = "look at the files in --data-dir"});
}

}  // namespace

std::shared_ptr<const ImageSource> read_mnist_files(const std::string& name, const std::filesystem::path& folder,
                                                    Split split, int classes) {
  const std::string prefix = split == Split::kTrain ? "train" : "t10k";
  const auto image_file = find_file(folder, prefix + "-images-idx3-ubyte");
  const auto label_file = find_file(folder, prefix + "-labels-idx1-ubyte");
  const torch::Tensor images = read_idx(image_file);
  check_images(images, image_file);
  return std::make_shared<MemoryImages>(name, images, read_idx(label_file), classes, label_file.string());
}

ImageTransforms FashionMNIST::normalised() { return {.mean = {kMean}, .deviation = {kDeviation}}; }

FashionMNIST::FashionMNIST(const std::filesystem::path& folder, Split split, const ImageTransforms& transforms)
    : ImageDataset(read_mnist_files("fashion-mnist", folder, split, kClasses), transforms) {}

}  // namespace lockstep
