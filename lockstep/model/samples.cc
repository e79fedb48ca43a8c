// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/samples.h"

#include <xxhash.h>

#include <algorithm>
#include <array>

namespace lockstep {
namespace {

constexpr int64_t kSamples = 16, kPlaces = 4096;

template <class Element>
uint64_t hash_of_elements(const torch::Tensor& tensor, uint64_t seed) {
  const auto* const data = static_cast<const Element*>(tensor.const_data_ptr());
  const int64_t count = tensor.numel(), stride = std::max<int64_t>(count / kPlaces, 1);
  std::array<Element, kSamples> found;
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t first = (count - 1) * i / (kSamples - 1);
    Element element = data[first];
    for (int64_t k = 1; k < kPlaces / kSamples && k * kSamples < count && element == Element{}; ++k)
      element = data[(first + k * stride) % count];
    found[i] = element;
  }
  return XXH3_64bits_withSeed(found.data(), sizeof found, seed);
}

}  // namespace

uint64_t hash_of_samples(const torch::Tensor& tensor, uint64_t seed) {
  if (!tensor.defined() || tensor.layout() != torch::kStrided || !tensor.is_cpu() || tensor.numel() == 0 ||
      !tensor.is_non_overlapping_and_dense())
    return seed;
  switch (tensor.element_size()) {
    case 1: return hash_of_elements<uint8_t>(tensor, seed);
    case 2: return hash_of_elements<uint16_t>(tensor, seed);
    case 4: return hash_of_elements<uint32_t>(tensor, seed);
    case 8: return hash_of_elements<uint64_t>(tensor, seed);
    case 16: return hash_of_elements<std::array<uint64_t, 2>>(tensor, seed);
    default: return seed;
  }
}

}  // namespace lockstep
