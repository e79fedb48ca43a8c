// collective/shm_dtype.h: torch's dtypes in the shared-memory core's words.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "lockstep/collective_types.h"

namespace lockstep {

// Nothing for a dtype that the core does not exchange.
inline std::optional<shm::DType> to_shm_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return shm::DType::kFloat32;
    case at::kDouble: return shm::DType::kFloat64;
    case at::kHalf: return shm::DType::kFloat16;
    case at::kBFloat16: return shm::DType::kBFloat16;
    case at::kChar: return shm::DType::kInt8;
    case at::kByte: return shm::DType::kUInt8;
    case at::kShort: return shm::DType::kInt16;
    case at::kInt: return shm::DType::kInt32;
    case at::kLong: return shm::DType::kInt64;
    case at::kBool: return shm::DType::kBool;
    default: return std::nullopt;
  }
}

}  // namespace lockstep
