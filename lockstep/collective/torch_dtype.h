// SPDX-License-Identifier: Apache-2.0
// collective/torch_dtype.h: torch's dtypes in the words of a Call.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "lockstep/collective_types.h"

namespace lockstep {

// None for a dtype that collectives do not exchange.
inline std::optional<DType> to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kChar: return DType::kInt8;
    case at::kByte: return DType::kUInt8;
    case at::kShort: return DType::kInt16;
    case at::kInt: return DType::kInt32;
    case at::kLong: return DType::kInt64;
    case at::kBool: return DType::kBool;
    default: return std::nullopt;
  }
}

}  // namespace lockstep
