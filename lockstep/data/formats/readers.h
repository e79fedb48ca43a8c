// SPDX-License-Identifier: Apache-2.0
// data/formats/readers.h: what the readers behind lockstep/datasets.h share with each other and with their tests.
//
// Threads: any
#pragma once

#include <torch/types.h>

#include <charconv>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/datasets.h"
#include "lockstep/error.h"

namespace lockstep {

// The images of any dataset in the MNIST family's files: MNIST, KMNIST, EMNIST's digits, Fashion-MNIST.
// Throws DataError, as FashionMNIST does.
std::shared_ptr<const ImageSource> read_mnist_files(const std::string& name, const std::filesystem::path& folder,
                                                    Split split);

// As parse_int of base/text.h, for every type of number.
template <class Number>
bool parse_number(std::string_view text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// Of the sizes and `each`; nothing where a size is negative, or 64 bits can't count it.
inline std::optional<std::int64_t> product(std::span<const std::int64_t> sizes, std::int64_t each = 1) {
  for (const std::int64_t size : sizes)
    if (size < 0 || __builtin_mul_overflow(each, size, &each)) return std::nullopt;
  return each;
}

// The content of a .npy file. Throws DataError naming `origin`.
torch::Tensor parse_npy(std::span<const std::uint8_t> bytes, const std::string& origin);

// A compressed file that grows beyond the limit of its reader.
DataError unpacked_too_much(const std::string& origin);

// Images from a random generator, the same in every run; a model can learn them. Sample i is of class i modulo
// `classes`: the mean of the class's pattern and noise. Kept in memory as bytes. Throws UsageError: a number below 1.
std::shared_ptr<const ImageSource> synthetic_images(std::int64_t samples, const ImageShape& shape,
                                                    std::int64_t classes);

}  // namespace lockstep
