// strategy/pipeline_stage.h: what one stage of a pipeline does with one batch.
//
// Flow:    micro-batches, or the stage before -> here -> the stage behind, or the loss; gradients the other way
// Owns:    what it keeps of a micro-batch between forward and backward
// Threads: one device's
// Ranks:   inside one process
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/model/stage.h"
#include "lockstep/model/task.h"
#include "lockstep/strategy/channel.h"
#include "lockstep/strategy/pipeline_schedule.h"

namespace lockstep {

// Between a stage and the next.
struct StageLink {
  explicit StageLink(std::size_t micro_batches) : forward(micro_batches), backward(micro_batches) {}
  Channel<Tensors> forward;   // activations, leaves that require gradients where the sender's do
  Channel<Tensors> backward;  // a gradient for each of them; undefined where there is none
};

struct StageWork {
  std::vector<Stage> pieces;
  std::shared_ptr<StageLink> before;  // none for the first stage
  std::shared_ptr<StageLink> behind;  // none for the last stage
  std::vector<Batch> micro_batches;   // of which the first stage reads the data, the last one the targets
  std::vector<PipelineStep> steps;
  std::int64_t samples = 0;  // of the whole batch, over all replicas
  std::uint64_t seed = 0;    // of the step and the replica; each piece and micro-batch draws from a sequence of its own,
  int first_piece = 0;       // so that dropout is the same wherever the model is cut
};

struct StageResult {
  double loss = 0;           // last stage: its micro-batches' share of the mean loss
  double busy = 0;           // seconds of forward and backward
  std::int64_t memory = 0;   // bytes of tensors, at most
  int in_flight = 0;         // micro-batches, at most
};

// Blocks until all steps are done. Throws what the pieces throw; PeerLost.
StageResult run_stage(Device& device, const Task& task, const StageWork& work);

}  // namespace lockstep
