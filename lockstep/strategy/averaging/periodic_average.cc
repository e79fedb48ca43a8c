#include "lockstep/periodic_average.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

void require_no_16_bits(const std::vector<NamedTensor>& parameters) {
  for (const auto& [name, parameter] : parameters)
    if (parameter.element_size() == 2)
      throw UsageError(
          {.what = concat("parameters of ", c10::toString(parameter.scalar_type()), " can't be averaged: ", name),
           .likely = "a model that was converted as a whole: optimizers keep such parameters in float32 beside",
           .next = "keep parameters in float32, and compute in 16 bits: --precision bfloat16, in_mixed_precision()"});
}

PeriodicAverage::PeriodicAverage(World world, const torch::nn::Module& module, const PeriodicAverageOptions& options)
    : world_(std::move(world)), parameters_(named_parameters(module)), options_(options) {
  if (options.first_steps < 0 || options.every < 1)
    throw UsageError({.what = concat("averages every ", options.every, " steps after the first ", options.first_steps),
                      .next = "at least every step, and no negative beginning"});
  require_no_16_bits(parameters_);
}

void PeriodicAverage::after_step() {
  const bool was_local = is_local();
  ++steps_;
  if (!was_local || (steps_ - options_.first_steps) % options_.every != 0) return;
  const torch::NoGradGuard no_grad;
  for (const auto& [name, parameter] : parameters_) world_.all_reduce(dense_view(parameter), ReduceOp::kMean);
}

}  // namespace lockstep
