// SPDX-License-Identifier: Apache-2.0
#include "lockstep/metric.h"

#include "lockstep/base/text.h"

namespace lockstep {

Metric top_k_accuracy(int64_t k) {
  return {.name = concat("top", k, "_accuracy"), .sum = [k](const Tensor& output, const Tensor& target) {
            const Tensor largest = std::get<1>(output.topk(k, 1));
            return largest.eq(target.unsqueeze(1)).any(1).sum();
          }};
}

Metric confusion_matrix(int64_t classes) {
  return {.name = "confusion_matrix",
          .sum =
              [classes](const Tensor& output, const Tensor& target) {
                const Tensor cells = target * classes + output.argmax(1);
                return cells.bincount({}, classes * classes).view({classes, classes});
              },
          .sizes = {classes, classes},
          .value = [](const Tensor& sum, int64_t) { return sum; }};
}

Metric mean_absolute_error() {
  return {.name = "mean_absolute_error", .sum = [](const Tensor& output, const Tensor& target) {
            return (output - target.view_as(output)).abs().flatten(1).mean(1).sum();
          }};
}

Metric r_squared(int64_t numbers) {
  return {.name = "r_squared",
          .sum =
              [numbers](const Tensor& output, const Tensor& target) {
                const Tensor is = output.reshape({-1, numbers}).to(torch::kFloat64);
                const Tensor wanted = target.reshape({-1, numbers}).to(torch::kFloat64);
                return torch::stack({wanted.sum(0), wanted.square().sum(0), (is - wanted).square().sum(0)});
              },
          .sizes = {3, numbers},
          .value =
              [](const Tensor& sum, int64_t samples) {
                const Tensor spread = sum[1] - sum[0].square() / samples;
                return (1 - sum[2] / spread).mean();
              }};
}

}  // namespace lockstep
