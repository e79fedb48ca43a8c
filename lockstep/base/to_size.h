// SPDX-License-Identifier: Apache-2.0
// base/to_size.h: a count that torch or the kernel gives as a signed number, as the std::size_t that containers take.
#pragma once

#include <cassert>
#include <concepts>
#include <cstddef>

namespace lockstep {

template <std::signed_integral T>
constexpr std::size_t to_size(T count) {
  assert(count >= 0);
  return static_cast<std::size_t>(count);
}

}  // namespace lockstep
