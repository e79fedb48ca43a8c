// SPDX-License-Identifier: Apache-2.0
// collective/torch_dtype.h: torch's dtypes in the words of a Call.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <optional>

#include "lockstep/collective_types.h"

namespace lockstep {

// None for a dtype that collectives do not exchange.
inline std::optional<DType> to_dtype(at::ScalarType dtype) {
  static constexpr std::array<at::ScalarType, kDTypes> kInOrderOfDType{
      at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
      at::kByte,  at::kShort,  at::kInt,  at::kLong,     at::kBool};
  const auto* const place = std::ranges::find(kInOrderOfDType, dtype);
  if (place == kInOrderOfDType.end()) return std::nullopt;
  return static_cast<DType>(place - kInOrderOfDType.begin());
}

}  // namespace lockstep
