// SPDX-License-Identifier: Apache-2.0
#include "lockstep/periodic_average.h"

#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/averaging/flat_block.h"

namespace lockstep {

PeriodicAverage::PeriodicAverage(World world, const torch::nn::Module& module, const PeriodicAverageOptions& options)
    : world_(std::move(world)), options_(options) {
  require(options.first_steps >= 0 && options.every >= 1,
          concat("averages every ", options.every, " steps after the first ", options.first_steps),
          "give every >= 1 and first_steps >= 0");
  const auto parameters = named_parameters(module);
  refuse_16_bit_parameters(parameters);
  parameters_ = tensors_of(parameters);
}

void PeriodicAverage::after_step() {
  const bool was_local = is_local();
  ++steps_;
  if (!was_local || (steps_ - options_.first_steps) % options_.every != 0) return;
  const torch::NoGradGuard no_grad;
  for (const Tensor& parameter : parameters_) world_.all_reduce(dense_view(parameter), ReduceOp::kMean);
}

}  // namespace lockstep
