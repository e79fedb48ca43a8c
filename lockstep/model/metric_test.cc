// SPDX-License-Identifier: Apache-2.0
#include "lockstep/metric.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

// Computes a figure of two batches, as evaluate() does.
torch::Tensor figure_of(const Metric& metric, const torch::Tensor& output, const torch::Tensor& target) {
  torch::Tensor sum = torch::zeros(metric.sizes, torch::kFloat64);
  for (const auto& [begin, end] : {std::pair(0, 2), std::pair(2, static_cast<int>(output.size(0)))})
    sum += metric.sum(output.slice(0, begin, end), target.slice(0, begin, end)).to(torch::kFloat64);
  return metric.value ? metric.value(sum, output.size(0)) : sum / output.size(0);
}

const torch::Tensor kLogits = torch::tensor({{3.F, 2.F, 1.F}, {1.F, 3.F, 2.F}, {1.F, 2.F, 3.F}, {3.F, 1.F, 2.F}});
const torch::Tensor kLabels = torch::tensor({0, 2, 0, 1}, torch::kInt64);

TEST(Metric, counts_targets_among_the_largest_outputs) {
  EXPECT_EQ(figure_of(top_k_accuracy(1), kLogits, kLabels).item<double>(), 0.25);
  EXPECT_EQ(figure_of(top_k_accuracy(2), kLogits, kLabels).item<double>(), 0.5);
  EXPECT_EQ(figure_of(top_k_accuracy(3), kLogits, kLabels).item<double>(), 1);
}

TEST(Metric, counts_predicted_classes_by_true_class) {
  const torch::Tensor counts = torch::tensor({{1.0, 0.0, 1.0}, {1.0, 0.0, 0.0}, {0.0, 1.0, 0.0}}, torch::kFloat64);
  EXPECT_TRUE(torch::equal(figure_of(confusion_matrix(3), kLogits, kLabels), counts));
}

TEST(Metric, has_the_error_and_the_determination_of_numbers) {
  const torch::Tensor output = torch::tensor({{1.F, 10.F}, {2.F, 20.F}, {4.F, 30.F}});
  const torch::Tensor target = torch::tensor({{1.F, 20.F}, {2.F, 20.F}, {3.F, 50.F}});
  EXPECT_NEAR(figure_of(mean_absolute_error(), output, target).item<double>(), (0.5 * 10 + 0 + 0.5 * 21) / 3, 1e-6);
  const double first = 1 - 1 / 2.0, second = 1 - 500 / 600.0;
  EXPECT_NEAR(figure_of(r_squared(2), output, target).item<double>(), (first + second) / 2, 1e-6);
}

}  // namespace
}  // namespace lockstep
