// SPDX-License-Identifier: Apache-2.0
// gradient/unused_parameters.h: finds the parameters that a loss does not depend on.
//
// Threads: one thread, while no backward() runs
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <functional>

namespace lockstep {

// Walks the graph behind `loss` once. Returns a function that says whether loss.backward() will reach a parameter (a
// leaf that requires a gradient); valid as long as `loss` exists. loss undefined: it reaches none.
std::function<bool(const torch::Tensor& parameter)> reached_by(const torch::Tensor& loss);

// The same for the backward() that runs on this thread; valid until it ends.
std::function<bool(const torch::Tensor& parameter)> reached_by_this_backward();

}  // namespace lockstep
