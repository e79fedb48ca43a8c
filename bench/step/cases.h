// SPDX-License-Identifier: Apache-2.0
// bench/step/cases.h: the training steps that are compared: five models, from small to heavy in parameters.
//
// Threads: values
// Ranks:   no communication
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/dataset.h"
#include "lockstep/task.h"

namespace lockstep::bench {

struct StepCase {
  std::string name;    // bench/step/pytorch.py knows it too
  std::int64_t batch;  // global
  std::string layout;  // of both systems: contiguous | channels_last
};
const std::vector<StepCase>& step_cases();

Task task_of(const StepCase& one);

// Random samples of the right shape: the time of a step does not depend on what they show.
Batch random_batch(const StepCase& one, std::int64_t size);

}  // namespace lockstep::bench
