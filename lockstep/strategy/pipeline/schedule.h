// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/schedule.h: in which order a stage of a pipeline works on its micro-batches.
//
//   naive  the whole batch forward through all stages, then back: one stage works, the others wait
//   gpipe  all micro-batches forward, then all back (Huang et al., 2019): every micro-batch is in flight at once
//   1f1b   as many forward as it takes to fill the stages behind, then one forward and one back in turn (Narayanan et
//          al., PipeDream, 2019; Megatron-LM, 2021): at most `stages` micro-batches are in flight
//
// On every stage forward steps come in the order 0, 1, ..., and so do backward steps: messages arrive in the order in
// which they are asked for.
//
// Threads: pure functions
#pragma once

#include <vector>

#include "lockstep/strategy.h"

namespace lockstep {

struct PipelineStep {
  bool forward = true;
  int micro_batch = 0;
  bool operator==(const PipelineStep&) const = default;
};

// What stage `stage` of `stages` does, in order.
std::vector<PipelineStep> steps_of_stage(PipelineSchedule schedule, int stage, int stages, int micro_batches);

// (p-1)/(m+p-1): the share of p stages' time in which they wait, if every stage takes the same time for each of m
// micro-batches and nothing else takes any.
double ideal_bubble(int stages, int micro_batches);

}  // namespace lockstep
