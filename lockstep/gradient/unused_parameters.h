// gradient/unused_parameters.h: which parameters a loss does not depend on.
#pragma once

#include <torch/types.h>

#include <functional>

namespace lockstep {

// Walks the graph behind `loss` once. Returns what tells, as long as `loss` lives, of a parameter (a leaf that
// requires a gradient) whether loss.backward() will reach it. loss undefined: it reaches none.
std::function<bool(const torch::Tensor& parameter)> reached_by(const torch::Tensor& loss);

}  // namespace lockstep
