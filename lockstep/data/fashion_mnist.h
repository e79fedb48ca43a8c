// data/fashion_mnist.h: 60,000 + 10,000 images of clothes, 28 x 28 grey, 10 classes.
//
// Source:  Xiao, Rasul and Vollgraf, "Fashion-MNIST" (2017), as Debian packages it: dataset-fashion-mnist. S0.
// Owns:    the images as bytes (45 MiB); float only exists in batches
// Threads: const after construction
#pragma once

#include <filesystem>

#include "lockstep/data/dataset.h"

namespace lockstep {

enum class Split { kTrain, kValidation };

class FashionMNIST : public Dataset {
 public:
  static constexpr const char* kDebianFolder = "/usr/share/datasets/fashion-mnist";
  static constexpr int kClasses = 10;

  // Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz. Throws DataError: a file that read_idx
  // refuses, counts that disagree between images and labels, a label out of range.
  explicit FashionMNIST(const std::filesystem::path& folder = kDebianFolder, Split split = Split::kTrain);

  std::string name() const override { return "fashion-mnist"; }
  std::int64_t size() const override { return images_.size(0); }

  // data: (B, 1, 28, 28) float32 with the training set's mean 0 and deviation 1; target: (B) int64.
  Batch make_batch(std::span<const std::int64_t> indices) const override;

 private:
  torch::Tensor images_;  // (N, 28, 28) uint8
  torch::Tensor labels_;  // (N) int64
};

}  // namespace lockstep
