// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective_types.h"

#include <array>

namespace lockstep {
namespace {

template <size_t N, class Enum>
std::string name_in(const std::array<const char*, N>& names, Enum value) {
  const auto index = static_cast<unsigned>(value);
  return index < N ? names[index] : "unknown";
}

}  // namespace

size_t size_of(DType dtype) {
  static constexpr std::array<size_t, kDTypes> kSizes{4, 8, 2, 2, 1, 1, 2, 4, 8, 1};
  return kSizes[static_cast<unsigned>(dtype)];
}

std::string to_string(DType dtype) {
  static constexpr std::array kNames{"float32", "float64", "float16", "bfloat16", "int8",
                                     "uint8",   "int16",   "int32",   "int64",    "bool"};
  return name_in(kNames, dtype);
}

std::string to_string(ReduceOp op) {
  static constexpr std::array kNames{"sum", "mean", "product", "min", "max", "band", "bor", "bxor"};
  return name_in(kNames, op);
}

std::string to_string(Algorithm algorithm) {
  static constexpr std::array kNames{"direct", "central", "ring", "tree"};
  return name_in(kNames, algorithm);
}

std::string to_string(Operation operation) {
  static constexpr std::array kNames{"nothing",    "barrier",   "all_reduce", "reduce",  "reduce_scatter",
                                     "all_gather", "broadcast", "gather",     "scatter", "all_to_all",
                                     "subgroup",   "step",      "send",       "receive"};
  return name_in(kNames, operation);
}

}  // namespace lockstep
