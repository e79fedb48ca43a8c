// SPDX-License-Identifier: Apache-2.0
// data/formats/readers.h: what the readers behind lockstep/datasets.h share with each other and with their tests.
//
// Threads: any
#pragma once

#include <torch/types.h>

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/datasets.h"

namespace lockstep {

// The images of any dataset in the MNIST family's files: MNIST, KMNIST, EMNIST's digits, Fashion-MNIST.
// Throws DataError, as FashionMNIST does.
std::shared_ptr<const ImageSource> read_mnist_files(const std::string& name, const std::filesystem::path& folder,
                                                    Split split, int classes);

struct CsvTable {
  std::vector<std::string> names;  // of the columns; "0", "1", ... in a file without a line of names
  torch::Tensor values;            // (rows, columns) float32
};

// Throws DataError, as csv_dataset does.
CsvTable read_csv(const std::filesystem::path& path, char delimiter = ',');

// The content of a .npy file. Throws DataError naming `origin`.
torch::Tensor parse_npy(std::span<const std::uint8_t> bytes, const std::string& origin);

struct SyntheticOptions {
  std::int64_t samples = 1024;
  ImageShape shape{3, 32, 32};
  std::int64_t classes = 10;
  std::uint64_t seed = 0;  // of the samples; the classes' patterns are the same for every seed
};

// Images from a random generator, the same in every run; a model can learn them. Sample i is of class i modulo
// `classes`: the mean of the class's pattern and noise. Kept in memory as bytes. Throws UsageError: a number below 1.
std::shared_ptr<const ImageSource> synthetic_images(const SyntheticOptions& options);

}  // namespace lockstep
