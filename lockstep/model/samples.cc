// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/samples.h"

#include <xxhash.h>

#include <array>
#include <cstring>

namespace lockstep {

std::uint64_t hash_of_samples(const torch::Tensor& tensor, std::uint64_t seed) {
  constexpr std::int64_t kElements = 16;
  constexpr std::int64_t kWidest = 16;  // bytes of an element: complex double
  if (!tensor.defined() || tensor.layout() != torch::kStrided || !tensor.is_cpu() || tensor.numel() == 0 ||
      !tensor.is_non_overlapping_and_dense() || static_cast<std::int64_t>(tensor.element_size()) > kWidest)
    return seed;
  const auto* const data = static_cast<const char*>(tensor.const_data_ptr());
  const auto width = tensor.element_size();
  std::array<char, kElements * kWidest> bytes;
  for (std::int64_t i = 0; i < kElements; ++i)
    std::memcpy(bytes.data() + width * i, data + (tensor.numel() - 1) * i / (kElements - 1) * width,
                static_cast<std::size_t>(width));
  return XXH3_64bits_withSeed(bytes.data(), static_cast<std::size_t>(kElements * width), seed);
}

}  // namespace lockstep
