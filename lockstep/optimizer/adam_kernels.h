// SPDX-License-Identifier: Apache-2.0
// optimizer/adam_kernels.h: the loops of Adam, AdamW and LAMB. Apart from the rest, because they are compiled without
// errno from sqrt: with it they would not be vectorised.
//
// Threads: pure functions
#pragma once

#include <cstdint>

namespace lockstep {

// The step's numbers, the same for every element.
template <class T>
struct AdamNumbers {
  T beta1, rest1;  // m = beta1 m + rest1 g;  rest1 = 1 - beta1, which T would round too much if taken from beta1
  T beta2, rest2;  // v = beta2 v + rest2 g^2
  T root;          // 1 / sqrt(1 - beta2^t)
  T rate;          // of m / (root sqrt(v) + eps)
  T eps;
  T coupled;  // g += coupled p, before the moments
  T keep;     // p = keep p - rate m / (root sqrt(v) + eps)
};

template <class T>
struct AdamArrays {
  std::int64_t count;
  T* parameter;
  T* gradient;
  T* average;  // m
  T* square;   // v
};

// Updates moments and parameters.
void adam_update(const AdamNumbers<float>& numbers, const AdamArrays<float>& arrays);
void adam_update(const AdamNumbers<double>& numbers, const AdamArrays<double>& arrays);

// Updates moments; the gradient becomes rate m / (root sqrt(v) + eps) + decay p: LAMB's direction.
void lamb_direction(const AdamNumbers<float>& numbers, float decay, const AdamArrays<float>& arrays);
void lamb_direction(const AdamNumbers<double>& numbers, double decay, const AdamArrays<double>& arrays);

}  // namespace lockstep
