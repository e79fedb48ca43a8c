// data/fashion_mnist.h: 60,000 + 10,000 images of clothes, 28 x 28 grey, 10 classes.
//
// Source:  Xiao, Rasul and Vollgraf, "Fashion-MNIST" (2017), as Debian packages it: dataset-fashion-mnist. S0.
// Owns:    the images as bytes (45 MiB); float only exists in batches
// Threads: const after construction
#pragma once

#include <filesystem>

#include "lockstep/data/image_dataset.h"

namespace lockstep {

enum class Split { kTrain, kValidation };

class FashionMNIST : public ImageDataset {
 public:
  static constexpr const char* kDebianFolder = "/usr/share/datasets/fashion-mnist";
  static constexpr int kClasses = 10;
  static ImageTransforms normalised();  // to mean 0 and deviation 1 over the training set

  // Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz. Throws DataError: a file that read_idx
  // refuses, counts that disagree between images and labels, a label out of range.
  // A batch's data: (B, 1, 28, 28) float32, unless the transforms say otherwise; target: (B) int64.
  explicit FashionMNIST(const std::filesystem::path& folder = kDebianFolder, Split split = Split::kTrain,
                        const ImageTransforms& transforms = normalised());
};

// The images of any dataset in the MNIST family's files: MNIST, KMNIST, EMNIST's digits, Fashion-MNIST.
std::shared_ptr<const ImageSource> read_mnist_files(const std::string& name, const std::filesystem::path& folder,
                                                    Split split, int classes);

}  // namespace lockstep
