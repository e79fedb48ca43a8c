// SPDX-License-Identifier: Apache-2.0
// base/to_size.h: numbers of one integral type as another: torch and the kernel give counts as signed numbers, containers
// take size_t, and ranks are ints. Checked in debug builds.
#pragma once

#include <cassert>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace lockstep {

template <std::signed_integral T>
constexpr size_t to_size(T count) {
  assert(count >= 0);
  return static_cast<size_t>(count);
}

template <std::integral T>
constexpr int to_int(T number) {
  assert(std::in_range<int>(number));
  return static_cast<int>(number);
}

template <std::integral T>
constexpr int64_t to_int64(T number) {
  assert(std::in_range<int64_t>(number));
  return static_cast<int64_t>(number);
}

template <std::integral T>
constexpr double to_double(T number) {
  return static_cast<double>(number);
}

template <std::integral T>
constexpr double fraction(T part, T whole) {
  return to_double(part) / to_double(whole);
}

}  // namespace lockstep
