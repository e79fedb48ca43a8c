// data/cifar.h: CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour images of 32 x 32, in their binary version.
//
// Source:  Krizhevsky, "Learning multiple layers of features from tiny images" (2009). A record is the label (CIFAR-100:
//          the coarse one of 20, then the fine one of 100) and 3072 bytes, red plane, green plane, blue plane.
// Owns:    the images as bytes (146 MiB)
// Threads: const after construction
#pragma once

#include <filesystem>

#include "lockstep/data/fashion_mnist.h"
#include "lockstep/data/image_dataset.h"

namespace lockstep {

class CIFAR10 : public ImageDataset {
 public:
  static ImageTransforms normalised();
  // Reads data_batch_1.bin ... data_batch_5.bin or test_batch.bin. A batch's data: (B, 3, 32, 32) float32.
  // Throws DataError: a file that is missing, empty or no whole number of records, a label out of range.
  explicit CIFAR10(const std::filesystem::path& folder, Split split = Split::kTrain,
                   const ImageTransforms& transforms = normalised());
};

class CIFAR100 : public ImageDataset {
 public:
  static ImageTransforms normalised();
  // Reads train.bin or test.bin; the target is the fine label.
  explicit CIFAR100(const std::filesystem::path& folder, Split split = Split::kTrain,
                    const ImageTransforms& transforms = normalised());
};

}  // namespace lockstep
