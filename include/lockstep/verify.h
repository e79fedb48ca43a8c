// lockstep/verify.h: trains the same model on one rank and on several, and compares what comes out: whether a task
// can be trained on many ranks at all, before days are spent on it.
//
// Flow:    a Task -> two short runs, ranks as threads of this process -> VerifyReport
// Threads: call from a thread that owns no torch state it minds losing; the ranks are threads
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/dataset.h"
#include "lockstep/strategy.h"

namespace lockstep {

struct VerifyOptions {
  int ranks = 2;
  int steps = 5;
  std::int64_t batch_size = 8;   // global
  bool double_precision = true;  // float64 leaves rounding far behind what a wrong exchange would do
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
  std::string describe() const;               // a line or two: equal, or the first that differs and by how much
};

// batch_of(step): the global batch of a step, the same each time it is asked. Dropout and other random layers are
// turned off (eval mode) unless the strategy has virtual shards. Throws what training throws.
VerifyReport verify(const Task& task, const std::function<Batch(int step)>& batch_of,
                    const VerifyOptions& options = {});

// The same on random batches of task.sample's shape. Throws UsageError: the task does not say its sample's shape.
VerifyReport verify(const Task& task, const VerifyOptions& options = {});

}  // namespace lockstep
