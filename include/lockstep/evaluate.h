// SPDX-License-Identifier: Apache-2.0
// lockstep/evaluate.h: loss, accuracy and other figures of a model over a dataset.
//
// Flow:    a dataset -> Task::forward -> Task::loss, Task::correct and Task::metrics -> sums over all ranks
// Owns:    nothing
// Threads: one thread
// Ranks:   every rank calls it and computes its part; all get the same exact result
#pragma once

#include "lockstep/loader.h"
#include "lockstep/task.h"

namespace lockstep {

struct Evaluation {
  double loss = 0;      // mean over all samples, as Task::samples counts them
  double accuracy = 0;  // share of samples that are right, as task.correct counts them; NaN without it
  int64_t samples = 0;  // as counted there
  std::map<std::string, Tensor> metrics{};  // of task.metrics, by name; float64, on the CPU
};

// Runs the model in evaluation mode, without gradients, over the samples in order, in batches of options.batch_size per
// rank; afterwards each of its modules is in the mode in which it was. Each sample counts once, whatever the number of ranks. model:
// on any device. Blocks; sends the sums. Throws what Loader and the task's functions throw; PeerLost.
Evaluation evaluate(const World& world, const Task& task, torch::nn::Module& model, const DatasetPtr& dataset,
                    LoaderOptions options);

// The same on one rank, such as evaluate_accuracy(task, *towers[0].model, validation).
template <class D>
double evaluate_accuracy(const Task& task, torch::nn::Module& model, D dataset) {
  return evaluate(World::single(), task, model, std::make_shared<const D>(std::move(dataset)), {.batch_size = 256})
      .accuracy;
}

}  // namespace lockstep
