// SPDX-License-Identifier: Apache-2.0
// lockstep/verify.h: trains the same model on one rank and on several, and compares the results: a quick check whether
// a task can be trained on many ranks, before days are spent on it.
//
// Flow:    a Task -> two short runs -> VerifyReport
// Owns:    nothing
// Threads: blocks until both runs are over. Their ranks are threads of this process, which seed torch's generator
// Ranks:   called by one process on its own
#pragma once

#include "lockstep/strategy.h"

namespace lockstep {

struct VerifyOptions {
  int ranks = 2;
  int steps = 5;
  int64_t batch_size = 8;        // global
  bool double_precision = true;  // float64: rounding is far smaller than the effect of a wrong exchange
  double tolerance = 1e-9;       // of each tensor's norm
  StrategyOptions strategy = {};
};

struct TensorDifference {
  std::string name;
  double relative = 0;  // 2-norm of the difference / 2-norm of the tensor
};

struct VerifyReport {
  bool equal = true;  // every tensor within the tolerance
  bool same_bits = true;
  double tolerance = 0;
  std::vector<TensorDifference> differences;  // of every parameter, in the model's order
  std::string describe() const;               // one line: equal, or the first parameter that differs and by how much
};

// batch_of(step): the global batch of a step, the same in every call. Turns dropout and other random layers off (eval
// mode) unless the strategy has virtual shards. Throws what training throws.
VerifyReport verify(const Task& task, const std::function<Batch(int step)>& batch_of,
                    const VerifyOptions& options = {});

// The same on random batches of the shape of task.sample. Throws UsageError: the task does not give that shape.
VerifyReport verify(const Task& task, const VerifyOptions& options = {});

}  // namespace lockstep
