// SPDX-License-Identifier: Apache-2.0
// tests/reference/ramp.h: numbers that the recorded references and the tests against them both begin with.
#pragma once

#include <torch/types.h>

namespace lockstep::testing {

// `count` values in [-0.5, 0.5), float64, that any language computes alike: make_ddp_reference.py has the same.
inline torch::Tensor ramp(int64_t count, int64_t seed) {
  return (torch::arange(count, torch::kInt64) * 7919 + seed * 104729).remainder(1009).to(torch::kFloat64) / 1009 - 0.5;
}

}  // namespace lockstep::testing
