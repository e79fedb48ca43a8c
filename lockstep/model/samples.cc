// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/samples.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace lockstep {
namespace {

bool is_all_zero(const char* element, int64_t width) {
  return std::all_of(element, element + width, [](char byte) { return byte == 0; });
}

}  // namespace

uint64_t hash_of_samples(const torch::Tensor& tensor, uint64_t seed) {
  constexpr int64_t kElements = 16, kPlaces = 4096;
  constexpr int64_t kWidest = 16;  // bytes of an element: complex double
  if (!tensor.defined() || tensor.layout() != torch::kStrided || !tensor.is_cpu() || tensor.numel() == 0 ||
      !tensor.is_non_overlapping_and_dense() || static_cast<int64_t>(tensor.element_size()) > kWidest)
    return seed;
  const auto* const data = static_cast<const char*>(tensor.const_data_ptr());
  const auto width = tensor.element_size();
  std::array<char, kElements * kWidest> bytes;
  const int64_t count = tensor.numel(), stride = std::max<int64_t>(count / kPlaces, 1);
  for (int64_t i = 0; i < kElements; ++i) {
    const int64_t first = (count - 1) * i / (kElements - 1);
    const char* element = data + first * width;
    for (int64_t k = 1; k < kPlaces / kElements && k * kElements < count && is_all_zero(element, width); ++k)
      element = data + (first + k * stride) % count * width;
    std::memcpy(bytes.data() + width * i, element, static_cast<size_t>(width));
  }
  return XXH3_64bits_withSeed(bytes.data(), static_cast<size_t>(kElements * width), seed);
}

}  // namespace lockstep
