// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective_types.h"

#include <array>

#include "lockstep/collective/calls/collective_names.h"

namespace lockstep {

size_t size_of(DType dtype) {
  static constexpr std::array<size_t, kDTypes> kSizes{4, 8, 2, 2, 1, 1, 2, 4, 8, 1};
  return kSizes[static_cast<unsigned>(dtype)];
}

std::string to_string(DType dtype) { return name_of(dtype); }
std::string to_string(ReduceOp op) { return name_of(op); }
std::string to_string(Algorithm algorithm) { return name_of(algorithm); }
std::string to_string(Operation operation) { return name_of(operation); }

}  // namespace lockstep
