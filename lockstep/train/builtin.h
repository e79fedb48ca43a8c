// SPDX-License-Identifier: Apache-2.0
// train/builtin.h: the datasets of a run: the task's own, or those that `lockstep train` knows by name, and what --data
// auto chooses; and the task with a model that suits them, the values with which its parameters begin (--weights), and those that
// stay (--freeze).
//
// Flow:    --data, --data-dir -> here -> lockstep/datasets.h -> train/loop.h; options -> Task::make_model of the task that is
//          returned -> a strategy
// Threads: any
// Ranks:   no communication; every rank gets the same datasets and reads the same file, rank 0 says what did not fit
#pragma once

#include <string>

#include "lockstep/datasets.h"
#include "lockstep/task.h"

namespace lockstep {

// Returns what task.make_data makes of the folder, if the task has it. Otherwise "auto" is Fashion-MNIST where the task takes
// its images or does not say what it takes, else synthetic data. Throws UsageError naming the datasets there are; DataError.
Datasets load_datasets(DataSource source, const Task& task);

// A batch of one sample; without tensors where that is damaged: the loader says so, or skips it.
Batch first_sample(const Dataset& dataset);

// The task with a model for the samples of these datasets, and this many classes (0: as many as the data has). Throws UsageError:
// the model takes other samples.
Task fitted(const Task& task, const Datasets& datasets, int64_t classes);

// The task with a model for these samples. task: one that has fit().
Task fitted_as(const Task& task, const SampleShape& sample);

// The task with a loss that names the sample at which it fails: where a target is no class of the model, it throws DataError.
Task with_named_targets(Task task);

// A checkpoint says this of its model, so that others can be made and given data.
struct Fit {
  SampleShape sample;
  DataFacts data;
};
std::string to_text(const Fit& fit);
Fit fit_of(const std::string& text);  // throws CheckpointError

// The same in a process that will fork: opens the data, and starts no thread for that.
Task fitted_before_fork(const Task& task, const DataSource& source, int64_t classes);

// The task with a loss that smooths labels; 0: as it is. Throws UsageError: its loss is not CrossEntropy.
Task smoothed(Task task, double label_smoothing);

// The task with models that begin with the tensors of a file (or of the index of several): lockstep's checkpoints, and files with
// the names of torchvision and Hugging Face. What is missing there, or has another shape, stays as make_model has it. Throws
// SystemError, CheckpointError; make_model throws UsageError: nothing fits.
Task with_weights(Task task, const std::string& file);

// The task with models whose parameters with names that the regular expression (ECMAScript) is found in require no gradient. Throws
// UsageError: no expression; make_model throws UsageError: it is found in none, or in all.
Task with_frozen(Task task, const std::string& pattern);

}  // namespace lockstep
