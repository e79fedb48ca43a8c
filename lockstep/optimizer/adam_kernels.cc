// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/adam_kernels.h"

#include <cmath>

namespace lockstep {
namespace {

template <class T>
void update(const AdamNumbers<T> n, const AdamArrays<T>& arrays) {
  T* __restrict parameter = arrays.parameter;
  T* __restrict average = arrays.average;
  T* __restrict square = arrays.square;
  const T* __restrict gradient = arrays.gradient;
  for (std::int64_t i = 0; i < arrays.count; ++i) {
    const T g = gradient[i] + n.coupled * parameter[i];
    const T m = n.beta1 * average[i] + n.rest1 * g;
    const T v = n.beta2 * square[i] + n.rest2 * g * g;
    average[i] = m;
    square[i] = v;
    parameter[i] = n.keep * parameter[i] - n.rate * m / (std::sqrt(v) * n.root + n.eps);
  }
}

template <class T>
void direction(const AdamNumbers<T> n, T decay, const AdamArrays<T>& arrays) {
  const T* __restrict parameter = arrays.parameter;
  T* __restrict average = arrays.average;
  T* __restrict square = arrays.square;
  T* __restrict gradient = arrays.gradient;
  for (std::int64_t i = 0; i < arrays.count; ++i) {
    const T g = gradient[i];
    const T m = n.beta1 * average[i] + n.rest1 * g;
    const T v = n.beta2 * square[i] + n.rest2 * g * g;
    average[i] = m;
    square[i] = v;
    gradient[i] = n.rate * m / (std::sqrt(v) * n.root + n.eps) + decay * parameter[i];
  }
}

}  // namespace

void adam_update(const AdamNumbers<float>& numbers, const AdamArrays<float>& arrays) { update(numbers, arrays); }
void adam_update(const AdamNumbers<double>& numbers, const AdamArrays<double>& arrays) { update(numbers, arrays); }

void lamb_direction(const AdamNumbers<float>& numbers, float decay, const AdamArrays<float>& arrays) {
  direction(numbers, decay, arrays);
}
void lamb_direction(const AdamNumbers<double>& numbers, double decay, const AdamArrays<double>& arrays) {
  direction(numbers, decay, arrays);
}

}  // namespace lockstep
