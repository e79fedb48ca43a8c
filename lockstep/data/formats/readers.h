// SPDX-License-Identifier: Apache-2.0
// data/formats/readers.h: what the readers behind lockstep/datasets.h share with each other and with their tests.
//
// Threads: any
#pragma once

#include <charconv>
#include <string_view>

#include "lockstep/data/formats/data_file.h"
#include "lockstep/datasets.h"
#include "lockstep/error.h"

namespace lockstep {

// The images of one split. Throw DataError, as FashionMNIST does. The MNIST family's files are those of MNIST, KMNIST,
// EMNIST's digits and Fashion-MNIST. CIFAR's are those of the binary version: data_batch_1.bin ... data_batch_5.bin or test_batch.bin,
// train.bin or test.bin, whose fine labels are the targets.
ImageSourcePtr read_mnist_files(const std::string& name, const fs::path& folder, Split split);
ImageSourcePtr read_cifar_files(const std::string& name, const fs::path& folder, Split split);

ImageTransforms photographs();  // the usual mean and deviation of ImageNet

// One split of "fashion-mnist", "mnist", "cifar-10" or "cifar-100", and how its images are normalised.
struct SplitImages {
  const char* name;
  ImageSourcePtr (*read)(const std::string& kind, const fs::path& folder, Split split);
  ImageTransforms (*normalised)();
};
const SplitImages& split_images(const std::string& kind);

// Reads the whole text as a number, as parse_int() of base/text.h does.
template <class Number>
bool parse_number(std::string_view text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// Multiplies the sizes and `each`. Returns nothing where a size is negative, or 64 bits can't count the product.
inline std::optional<int64_t> product(std::span<const int64_t> sizes, int64_t each = 1) {
  for (const int64_t size : sizes)
    if (size < 0 || __builtin_mul_overflow(each, size, &each)) return std::nullopt;
  return each;
}

// The header of a .npy file.
struct NpyHeader {
  torch::ScalarType dtype;
  bool fortran;
  std::vector<int64_t> shape;
  size_t bytes;  // of the header: what follows are the values
};

// `start` holds at least the header of a file of `all` bytes. Throws DataError, as read_npy does.
NpyHeader parse_npy(ByteView start, size_t all, const std::string& origin);

// Throws UsageError: bool, a dtype that the format does not have, more than 16 dimensions.
std::string npy_header(torch::ScalarType dtype, std::span<const int64_t> shape);

// A token of so many bits; 0: there are none such, which TokenDataset refuses.
inline int bytes_of_token(int bits) { return bits % 8 == 0 ? bits / 8 : 0; }

// Bytes with 3 or 4 dimensions, whose targets are whole numbers, as images; null: other arrays, which are rows. classes: 0: the
// largest target + 1. `origin` names the file in errors. Throws DataError, as MemoryImages does.
ImageSourcePtr images_in(const std::string& name, const Tensor& data, const Tensor& target, int64_t classes,
                         const std::string& origin);

// Images from a random generator, the same in every run; a model can learn them. Sample i is of class i modulo
// `classes`: the mean of the class's pattern and noise. Kept in memory as bytes. Throws UsageError: a number below 1.
ImageSourcePtr synthetic_images(int64_t samples, const ImageShape& shape, int64_t classes);

}  // namespace lockstep
