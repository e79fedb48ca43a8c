// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/evaluate.h"

#include <limits>

namespace lockstep {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// Sums over samples; float64 holds every count exactly.
struct Sums {
  double loss = 0;
  double correct = 0;
  double samples = 0;
};

Sums evaluate_part(const Task& task, Strategy& strategy, Loader& loader) {
  Sums sums;
  for (const Batch& batch : loader.epoch(0)) {
    if (batch.size() == 0) continue;
    const auto samples = static_cast<double>(batch.size());
    const torch::Tensor output = strategy.forward(batch.data);
    sums.loss += task.loss(output, batch.target).item<double>() * samples;
    sums.correct += task.correct ? task.correct(output, batch.target).item<double>() : kUnknown;
    sums.samples += samples;
  }
  return sums;
}

}  // namespace

Evaluation evaluate(const World& world, const Task& task, Strategy& strategy,
                    const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options) {
  const torch::NoGradGuard no_grad;
  strategy.synchronise();
  strategy.model().eval();
  LoaderOptions in_order = options;
  in_order.batch_size *= world.size();
  in_order.shuffle = false;
  Loader loader(world, dataset, in_order);
  const Sums mine = evaluate_part(task, strategy, loader);
  strategy.model().train();
  const torch::Tensor sums = torch::tensor({mine.loss, mine.correct, mine.samples}, torch::kFloat64);
  world.all_reduce(sums);
  const auto* total = sums.const_data_ptr<double>();
  return {.loss = total[0] / total[2], .accuracy = total[1] / total[2], .samples = static_cast<std::int64_t>(total[2])};
}

}  // namespace lockstep
