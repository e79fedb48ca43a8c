// SPDX-License-Identifier: Apache-2.0
// train/weights.h: where a model's parameters begin (--weights), and which of them stay there (--freeze).
//
// Flow:    a safetensors file, a pattern -> Task::make_model of the task that is returned -> a strategy
// Threads: as Task::make_model
// Ranks:   no communication; each reads the file, rank 0 says what did not fit
#pragma once

#include <string>

#include "lockstep/task.h"

namespace lockstep {

// The task with models that begin with the tensors of a file (or of the index of several): lockstep's checkpoints, and files with
// the names of torchvision and Hugging Face. What is missing there, or has another shape, stays as make_model has it. Throws
// SystemError, CheckpointError; make_model throws UsageError: nothing fits.
Task with_weights(Task task, const std::string& file);

// The task with models whose parameters with names that the regular expression (ECMAScript) is found in require no gradient. Throws
// UsageError: no expression; make_model throws UsageError: it is found in none, or in all.
Task with_frozen(Task task, const std::string& pattern);

}  // namespace lockstep
