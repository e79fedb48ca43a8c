// train/builtin.h: the models and datasets that `lockstep train` knows by name.
#pragma once

#include <string>
#include <vector>

#include "lockstep/model/task.h"
#include "lockstep/train/options.h"

namespace lockstep {

std::vector<std::string> model_names();  // for --help
Task builtin_task(const std::string& model);  // throws UsageError naming the models there are

std::vector<std::string> dataset_names();
// Throws UsageError naming the datasets there are, DataError.
Datasets builtin_datasets(const TrainOptions& options);

}  // namespace lockstep
