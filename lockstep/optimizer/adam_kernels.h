// SPDX-License-Identifier: Apache-2.0
// optimizer/adam_kernels.h: the loops of Adam, AdamW and LAMB. Apart from the rest, because they are compiled without
// errno from sqrt: with it they would not be vectorised.
//
// Threads: pure functions
#pragma once

#include "lockstep/update_rule.h"

namespace lockstep {

// The step's numbers, the same for every element.
template <class T>
struct AdamNumbers {
  T beta1, rest1;  // m = beta1 m + rest1 g;  rest1 = 1 - beta1, which T would round too much if taken from beta1
  T beta2, rest2;  // v = beta2 v + rest2 g^2
  T root;          // 1 / sqrt(1 - beta2^t)
  T rate;          // of m / (root sqrt(v) + eps)
  T eps;
  T decay = 0;  // Adam: g += decay p, before the moments; LAMB: direction += decay p
  T keep = 1;   // p = keep p - rate m / (root sqrt(v) + eps)
};

// Updates moments and parameters. T: float or double.
template <class T>
void adam_update(AdamNumbers<T> n, const Elements<T>& elements);

// Updates moments; the gradient becomes rate m / (root sqrt(v) + eps) + decay p: LAMB's direction.
template <class T>
void lamb_direction(AdamNumbers<T> n, const Elements<T>& elements);

}  // namespace lockstep
