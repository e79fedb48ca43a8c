// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/evaluate.h"

#include <cmath>

#include "lockstep/observe/phase_scope.h"

namespace lockstep {
namespace {

// Sums over samples of the loss, of what is correct, and of 1; float64 holds every count exactly.
torch::Tensor evaluate_part(const Task& task, Strategy& strategy, Loader& loader) {
  torch::Tensor sums = torch::zeros(3, torch::kFloat64);
  for (const Batch& batch : loader.epoch(0)) {
    if (batch.size() == 0) continue;
    const auto samples = static_cast<double>(batch.size());
    const torch::Tensor output = strategy.forward(batch.data);
    if (!output.defined()) continue;  // another rank has it
    const torch::Tensor target = batch.target.to(output.device());
    const double loss = task.loss(output, target).item<double>() * samples;
    const double correct = task.correct ? task.correct(output, target).item<double>() : std::nan("");
    sums += torch::tensor({loss, correct, samples}, torch::kFloat64);
  }
  return sums;
}

}  // namespace

Evaluation evaluate(const World& world, const Task& task, Strategy& strategy,
                    const std::shared_ptr<const Dataset>& dataset, LoaderOptions options) {
  const torch::NoGradGuard no_grad;
  const PhaseScope validating(Phase::kValidating);
  strategy.synchronise();
  strategy.model().eval();
  const World sharing = strategy.ranks(world).validation;
  options.batch_size *= sharing.size();
  options.shuffle = false;
  Loader loader(sharing, dataset, options);
  const torch::Tensor sums = evaluate_part(task, strategy, loader);
  strategy.model().train();
  world.all_reduce(sums);
  const auto* total = sums.const_data_ptr<double>();
  return {.loss = total[0] / total[2], .accuracy = total[1] / total[2], .samples = static_cast<std::int64_t>(total[2])};
}

}  // namespace lockstep
