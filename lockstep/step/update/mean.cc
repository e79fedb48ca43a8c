// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/update/mean.h"

#include <algorithm>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

template <class Data, class T>
void scale(const Term& term, int64_t begin, int64_t count, T* __restrict sum) {
  const Data* __restrict data = static_cast<const Data*>(term.data) + begin;
  const T weight = static_cast<T>(term.weight);
  for (int64_t i = 0; i < count; ++i) sum[i] = weight * static_cast<T>(data[i]);
}

template <class Data, class T>
void scale_pair(const Term& a, const Term& b, int64_t begin, int64_t count, T* __restrict sum) {
  const Data* __restrict first = static_cast<const Data*>(a.data) + begin;
  const Data* __restrict second = static_cast<const Data*>(b.data) + begin;
  const T first_weight = static_cast<T>(a.weight);
  const T second_weight = static_cast<T>(b.weight);
  for (int64_t i = 0; i < count; ++i)
    sum[i] = first_weight * static_cast<T>(first[i]) + second_weight * static_cast<T>(second[i]);
}

template <class T>
void add(const T* __restrict addend, int64_t count, T* __restrict sum) {
  for (int64_t i = 0; i < count; ++i) sum[i] += addend[i];
}

// The tree's left half has as many terms as the largest power of two below their number, so a pair of neighbours is
// never separated. This is what makes virtual shards independent of the number of ranks: with V shards there are V
// terms in the same order, whichever rank computed which, hence the same tree and the same bits. Each level needs one
// buffer of a chunk on the stack: log2(terms) times 16 or 32 KiB.
template <class Data, class T>
void sum_tree(std::span<const Term> terms, int64_t begin, int64_t count, T* sum) {
  if (terms.size() == 1 && terms[0].data == nullptr) return static_cast<void>(std::fill_n(sum, count, T(0)));
  if (terms.size() == 1) return scale<Data>(terms[0], begin, count, sum);
  const bool both = terms[0].data != nullptr && terms[1].data != nullptr;
  if (terms.size() == 2 && both) return scale_pair<Data>(terms[0], terms[1], begin, count, sum);
  const size_t left = std::bit_floor(terms.size() - 1);
  alignas(kCacheLine) T right_sum[kMaxChunk];
  sum_tree<Data>(terms.first(left), begin, count, sum);
  sum_tree<Data>(terms.subspan(left), begin, count, right_sum);
  add(right_sum, count, sum);
}

}  // namespace

template <class T>
void weighted_sum(std::span<const Term> terms, torch::ScalarType dtype, int64_t begin, int64_t count, T* sum) {
  switch (dtype) {
    case torch::kFloat32: return sum_tree<float>(terms, begin, count, sum);
    case torch::kFloat64: return sum_tree<double>(terms, begin, count, sum);
    case torch::kFloat16: return sum_tree<c10::Half>(terms, begin, count, sum);
    case torch::kBFloat16: return sum_tree<c10::BFloat16>(terms, begin, count, sum);
    default:
      throw UsageError({.what = concat("gradients of ", c10::toString(dtype), " can't be averaged"),
                        .next = "train in float32, float64, float16 or bfloat16"});
  }
}

namespace {

template <class Data, class T>
void replace(std::span<const Term> terms, torch::ScalarType dtype, int64_t begin, int64_t count) {
  alignas(kCacheLine) T sum[kMaxChunk];
  weighted_sum<T>(terms, dtype, begin, count, sum);
  for (const Term& term : terms) {
    Data* const data = static_cast<Data*>(const_cast<void*>(term.data)) + begin;
    for (int64_t i = 0; i < count; ++i) data[i] = static_cast<Data>(sum[i]);
  }
}

}  // namespace

void replace_by_sum(std::span<const Term> terms, torch::ScalarType dtype, int64_t begin, int64_t count) {
  switch (dtype) {
    case torch::kFloat64: return replace<double, double>(terms, dtype, begin, count);
    case torch::kFloat16: return replace<c10::Half, float>(terms, dtype, begin, count);
    case torch::kBFloat16: return replace<c10::BFloat16, float>(terms, dtype, begin, count);
    default: return replace<float, float>(terms, dtype, begin, count);  // throws if it is another one
  }
}

template void weighted_sum(std::span<const Term>, torch::ScalarType, int64_t, int64_t, float*);
template void weighted_sum(std::span<const Term>, torch::ScalarType, int64_t, int64_t, double*);

}  // namespace lockstep
