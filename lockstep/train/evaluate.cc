#include "lockstep/train/evaluate.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "lockstep/data/sampler.h"

namespace lockstep {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Sums over samples; float64 holds every count exactly.
struct Sums {
  double loss = 0;
  double correct = 0;
  double samples = 0;
};

Sums evaluate_batch(const Task& task, Strategy& strategy, const Batch& batch) {
  const torch::Tensor output = strategy.forward(batch.data);
  const auto samples = static_cast<double>(batch.size());
  return {.loss = task.loss(output, batch.target).item<double>() * samples,
          .correct = task.correct ? task.correct(output, batch.target).item<double>() : kNaN,
          .samples = samples};
}

Sums evaluate_part(const Task& task, Strategy& strategy, const Dataset& dataset, Range part, torch::Device device,
                   std::int64_t batch_size) {
  Sums sums;
  for (std::int64_t begin = part.begin; begin < part.end; begin += batch_size) {
    std::vector<std::int64_t> indices(static_cast<std::size_t>(std::min(batch_size, part.end - begin)));
    std::iota(indices.begin(), indices.end(), begin);
    const Batch batch = dataset.make_batch(indices);
    const Sums found = evaluate_batch(task, strategy, {batch.data.to(device), batch.target.to(device)});
    sums.loss += found.loss;
    sums.correct += found.correct;
    sums.samples += found.samples;
  }
  return sums;
}

}  // namespace

Evaluation evaluate(const World& world, const Task& task, Strategy& strategy, const Dataset& dataset,
                    std::int64_t batch_size) {
  const torch::NoGradGuard no_grad;
  strategy.synchronise();
  strategy.model().eval();
  const Range part = even_part(dataset.size(), world.rank(), world.size());
  const Sums mine = evaluate_part(task, strategy, dataset, part, world.device(), batch_size);
  strategy.model().train();
  const torch::Tensor sums = torch::tensor({mine.loss, mine.correct, mine.samples}, torch::kFloat64);
  world.all_reduce(sums);
  const auto* total = sums.const_data_ptr<double>();
  return {.loss = total[0] / total[2],
          .accuracy = total[1] / total[2],
          .samples = static_cast<std::int64_t>(total[2])};
}

}  // namespace lockstep
