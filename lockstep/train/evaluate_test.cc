// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/evaluate.h"

#include <mutex>

#include "lockstep/datasets.h"
#include "tests/strategies.h"

namespace lockstep {
namespace {

// Compares what several ranks find, in batches of several sizes.
void expect_the_same_figures(Task task, const Batch& all) {
  const auto dataset = std::make_shared<TensorDataset>("weighted", all.data, all.target, all.more);
  task.make_model = [make = task.make_model] {
    const ModulePtr model = make();
    model->to(torch::kFloat32);  // as the dataset's data
    return model;
  };
  const auto rows = [](const torch::Tensor& output, const torch::Tensor&) { return torch::tensor(output.size(0)); };
  task.metrics.push_back({.name = "rows", .sum = rows});
  std::vector<double> figures;
  std::mutex mutex;
  for (const int ranks : {1, 3})
    run_ranks(ranks, [&](World& world) {
      const auto strategy = make_strategy(world, task, {.seed = 4});
      const Evaluation found = evaluate(world, task, *strategy, dataset, {.batch_size = 2});
      const Evaluation same = evaluate(world, task, strategy->model(), dataset, {.batch_size = 3});
      const std::lock_guard lock(mutex);
      for (const Evaluation& each : {found, same}) {
        figures.push_back(each.loss + each.metrics.at("weight_of_right").item<double>());
        EXPECT_EQ(each.metrics.at("rows").item<double>(), 1);  // also those that count nothing
      }
    });
  for (const double figure : figures) EXPECT_NEAR(figure, figures.front(), 1e-4);
}

TEST(Evaluate, gives_loss_and_metrics_all_of_a_batch) {
  expect_the_same_figures(testing::weighted_task(), testing::weighted_batch(0));
}

TEST(Evaluate, gives_means_over_what_the_task_counts) {
  expect_the_same_figures(testing::counted_task(), testing::counted_batch(0));
}

}  // namespace
}  // namespace lockstep
