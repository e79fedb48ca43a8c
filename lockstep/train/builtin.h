// train/builtin.h: the datasets that `lockstep train` knows by name.
#pragma once

#include <string>
#include <vector>

#include "lockstep/task.h"
#include "lockstep/train/options.h"

namespace lockstep {

std::vector<std::string> dataset_names();  // for --help

// "auto" is Fashion-MNIST where the task takes its images or does not say what it takes, else synthetic data.
// Throws UsageError naming the datasets there are, or that the task takes another shape; DataError.
Datasets builtin_datasets(const TrainOptions& options, const Task& task);

}  // namespace lockstep
