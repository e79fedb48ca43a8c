// SPDX-License-Identifier: Apache-2.0
// base/cache_line.h: memory that begins where a cache line does.
#pragma once

#include <concepts>
#include <cstddef>

namespace lockstep {

inline constexpr size_t kCacheLine = 64;  // bytes

// 65, 64 -> 128
template <std::integral T>
constexpr T round_up(T value, T unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace lockstep
