// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/schedule.h"

#include <algorithm>

namespace lockstep {

// Three phases. First `ahead` forward steps fill the stages behind: with 1f1b, stage s of p may be p - s micro-batches
// ahead, because that many fit between it and the end of the pipeline and back. Then one backward and one forward step
// in turn, so that `ahead` micro-batches stay in flight. Last, the remaining backward steps. gpipe and naive are the case
// of ahead = m: all forward, then all backward.
std::vector<PipelineStep> steps_of_stage(PipelineSchedule schedule, int stage, int stages, int micro_batches) {
  const int ahead = schedule == PipelineSchedule::k1F1B ? std::min(stages - stage, micro_batches) : micro_batches;
  std::vector<PipelineStep> steps;
  for (int i = 0; i < ahead; ++i) steps.push_back({.forward = true, .micro_batch = i});
  for (int i = 0; i < micro_batches; ++i) {
    steps.push_back({.forward = false, .micro_batch = i});
    if (i + ahead < micro_batches) steps.push_back({.forward = true, .micro_batch = i + ahead});
  }
  return steps;
}

double ideal_bubble(int stages, int micro_batches) {
  return static_cast<double>(stages - 1) / static_cast<double>(micro_batches + stages - 1);
}

}  // namespace lockstep
