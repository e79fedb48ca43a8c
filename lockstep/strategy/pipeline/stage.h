// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/stage.h: what one stage of a pipeline does with one batch.
//
// Flow:    micro-batches, or the stage before -> here -> the stage behind, or the loss; gradients the other way
// Owns:    what it keeps of a micro-batch between forward and backward
// Threads: one, which has a ThreadGenerator
// Ranks:   communicates through the links only
#pragma once

#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/strategy.h"
#include "lockstep/strategy/autograd.h"
#include "lockstep/strategy/pipeline/links.h"
#include "lockstep/task.h"

namespace lockstep {

// The order in which a stage works on its micro-batches; docs/strategies/pipeline.md has the schedules. On every stage
// forward steps come in the order 0, 1, ..., and so do backward steps (StageRun::run says why).
struct PipelineStep {
  bool forward = true;
  int micro_batch = 0;
  bool operator==(const PipelineStep&) const = default;
};

// Micro-batches between forward and backward on stage `stage` of `stages`.
int most_in_flight(PipelineSchedule schedule, int stage, int stages, int micro_batches);

// The steps of the stage, in order.
std::vector<PipelineStep> steps_of_stage(PipelineSchedule schedule, int stage, int stages, int micro_batches);

struct StageWork {
  std::vector<Piece> pieces{};     // no other stage of this process uses their parameters (add_in_place.h)
  IntVector<Batch> micro_batches;  // the first stage reads the data, the last one the targets
  IntVector<int64_t> counts;       // how much each of these counts in the mean
  std::vector<PipelineStep> steps;
  int64_t samples = 0;  // of the whole batch, over all replicas
  uint64_t seed = 0;    // of the step and the replica. Each piece and micro-batch gets a seed of its own from it,
  int first_piece = 0;  // so that dropout is the same wherever the model is cut
  torch::Device device = torch::kCPU;
  milliseconds timeout = kDefaultTimeout;  // of a wait for the device
  bool waits = false;  // for the device after each step: times are those of the work, and a GPU that hangs is named
};

struct StageResult {
  double loss = 0;     // last stage: its micro-batches' share of the mean loss
  double busy = 0;     // seconds of forward and backward
  int64_t memory = 0;  // bytes of tensors on `device`, at most
  int in_flight = 0;   // micro-batches, at most
};

// Blocks until all steps are done. Throws what the pieces throw; PeerLost.
StageResult run_stage(const Task& task, const StageWork& work, const StageLinks& links);

// The places in the graph where backward from each of these tensors begins; it does not need their values.
using Edges = std::vector<torch::autograd::Edge>;
Edges edges_of(const Tensors& outputs);

// Backward from the outputs whose gradient is defined. A gradient that the caller has moved here is freed as soon as
// backward is done with it.
void backward_from(Edges outputs, Tensors gradients);

// The micro-batches of a batch, at most `most`: as even as possible, none of them empty; none at all of an empty batch.
IntVector<Batch> micro_batches_of(const Batch& batch, int64_t most);

}  // namespace lockstep
