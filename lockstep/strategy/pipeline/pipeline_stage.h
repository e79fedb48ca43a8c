// strategy/pipeline/pipeline_stage.h: what one stage of a pipeline does with one batch.
//
// Flow:    micro-batches, or the stage before -> here -> the stage behind, or the loss; gradients the other way
// Owns:    what it keeps of a micro-batch between forward and backward
// Threads: one
// Ranks:   no communication but through the links
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "lockstep/dataset.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/strategy/pipeline/pipeline_schedule.h"
#include "lockstep/task.h"

namespace lockstep {

// A stage's side of the connection with a neighbour. Forward go activations: leaves, which require gradients where the
// sender's do. Backward goes a gradient for each of them, undefined where there is none.
class StageLink {
 public:
  virtual ~StageLink() = default;
  virtual void send(Tensors tensors) = 0;  // may block until there is room. Throws PeerLost
  virtual Tensors receive() = 0;           // blocks until they are there. Throws PeerLost
};

struct StageLinks {
  StageLink* before = nullptr;  // none for the first stage
  StageLink* behind = nullptr;  // none for the last stage
};

struct StageWork {
  std::vector<Piece> pieces;
  std::vector<Batch> micro_batches;  // of which the first stage reads the data, the last one the targets
  std::vector<PipelineStep> steps;
  std::int64_t samples = 0;  // of the whole batch, over all replicas
  std::uint64_t seed = 0;  // of the step and the replica; each piece and micro-batch draws from a sequence of its own,
  int first_piece = 0;     // so that dropout is the same wherever the model is cut
};

struct StageResult {
  double loss = 0;          // last stage: its micro-batches' share of the mean loss
  double busy = 0;          // seconds of forward and backward
  std::int64_t memory = 0;  // bytes of tensors, at most
  int in_flight = 0;        // micro-batches, at most
};

// Blocks until all steps are done. Throws what the pieces throw; PeerLost.
StageResult run_stage(const Task& task, const StageWork& work, const StageLinks& links, ThreadGenerator& generator);

// The micro-batches of a batch: as even as possible, none of them empty; none at all of an empty batch.
std::vector<Batch> micro_batches_of(const Batch& batch, std::int64_t most);

}  // namespace lockstep
