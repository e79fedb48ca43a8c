#include "lockstep/strategy/pipeline/pipeline_schedule.h"

#include <algorithm>

namespace lockstep {

// A stage may be `ahead` forward steps before its first backward step; from then on it alternates.
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

int most_in_flight(const std::vector<PipelineStep>& steps) {
  int now = 0, most = 0;
  for (const PipelineStep& step : steps) {
    now += step.forward ? 1 : -1;
    most = std::max(most, now);
  }
  return most;
}

double ideal_bubble(int stages, int micro_batches) {
  return static_cast<double>(stages - 1) / static_cast<double>(micro_batches + stages - 1);
}

}  // namespace lockstep
