// SPDX-License-Identifier: Apache-2.0
// lockstep/metric.h: a figure of a model over a dataset, besides loss and accuracy.
//
// Flow:    output and target of each batch -> sum, added up over batches and ranks -> value
// Owns:    nothing
// Threads: pure functions
// Ranks:   evaluate() adds the sums up over ranks, in float64: counts are exact
#pragma once

#include "lockstep/batch.h"

namespace lockstep {

struct Metric {
  std::string name;  // such as "top5_accuracy"
  // The model's output and (B, ...) target, or the batch -> what the batch adds: a tensor of `sizes`, on any device.
  OutputFunction sum;
  std::vector<int64_t> sizes = {};  // empty: a scalar
  // (sum over the dataset, float64 on the CPU; its rows, whatever Task::samples counts) -> the figure, of any sizes.
  // Empty: their quotient.
  std::function<Tensor(const Tensor& sum, int64_t samples)> value = nullptr;
};

// For outputs (B, classes) and targets (B) int64: the share of samples whose target is among the k largest outputs.
Metric top_k_accuracy(int64_t k);

// For the same: (classes, classes), how many samples of the row's class were predicted as the column's.
Metric confusion_matrix(int64_t classes);

// For outputs and targets that are numbers (B, numbers): the mean of |output - target|; and the coefficient of determination,
// the mean over the numbers of 1 - sum (output - target)^2 / sum (target - mean)^2.
Metric mean_absolute_error();
Metric r_squared(int64_t numbers);

}  // namespace lockstep
