// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/adam_kernels.h"

#include <cmath>

namespace lockstep {

template <class T>
void adam_update(const AdamNumbers<T> n, const Elements<T>& elements) {
  const auto [count, parameter, gradient, state, step, trust, new_parameter, new_state] = elements;
  const auto [average, square] = state;
  const auto [new_average, new_square] = new_state;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = gradient[i] + n.decay * parameter[i];
    const T m = n.beta1 * average[i] + n.rest1 * g;
    const T v = n.beta2 * square[i] + n.rest2 * g * g;
    new_average[i] = m;
    new_square[i] = v;
    new_parameter[i] = n.keep * parameter[i] - n.rate * m / (std::sqrt(v) * n.root + n.eps);
  }
}

template <class T>
void lamb_direction(const AdamNumbers<T> n, const Elements<T>& elements) {
  const auto [count, parameter, gradient, state, step, trust, new_parameter, new_state] = elements;
  const auto [average, square] = state;
  const auto [new_average, new_square] = new_state;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = gradient[i];
    const T m = n.beta1 * average[i] + n.rest1 * g;
    const T v = n.beta2 * square[i] + n.rest2 * g * g;
    new_average[i] = m;
    new_square[i] = v;
    gradient[i] = n.rate * m / (std::sqrt(v) * n.root + n.eps) + n.decay * parameter[i];
  }
}

template void adam_update(AdamNumbers<float>, const Elements<float>&);
template void adam_update(AdamNumbers<double>, const Elements<double>&);
template void lamb_direction(AdamNumbers<float>, const Elements<float>&);
template void lamb_direction(AdamNumbers<double>, const Elements<double>&);

}  // namespace lockstep
