// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/stage_parameters.h: which parameters each stage has, and how ranks with a stage each keep them the
// same: gradients of replicas and of parameters that several stages use, values and optimizer state of other stages.
//
// Flow:    pieces and their cut -> here -> World
// Owns:    references to the model's parameters and buffers
// Threads: one
// Ranks:   every rank makes the same calls with the same cut
#pragma once

#include <vector>

#include "lockstep/optimizer.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/world.h"

namespace lockstep {

// The ranks of a pipeline: rank i has stage i % p of replica i / p.
struct PipelineRanks {
  World all;
  World of_stage;    // the replicas of this rank's stage
  World of_replica;  // the stages of this rank's replica: stage s is its rank s
};

class StageParameters {
 public:
  StageParameters(const std::vector<Piece>& pieces, const Cut& cut);

  // Gives every rank of a stage the sum of the replicas' gradients, and every stage that uses a shared parameter the sum
  // of all stages' gradients. One all_reduce per parameter; sends 2(d-1)/d K of the stage over d replicas. A missing
  // gradient counts as zero; a parameter without a gradient on any replica keeps none. Throws PeerLost.
  void sum_gradients(const PipelineRanks& ranks);

  // Gives every rank the parameters and buffers of all stages. Sends K. Throws PeerLost.
  void broadcast(const PipelineRanks& ranks) const;

  // Gives rank 0 the optimizer's state of all stages, from the first replica. Throws PeerLost.
  void collect_state(const PipelineRanks& ranks, Optimizer& optimizer) const;

 private:
  struct OfStage {
    std::vector<torch::Tensor> used;   // by its pieces
    std::vector<torch::Tensor> owned;  // used, and by no stage before
    std::vector<torch::Tensor> buffers;
  };
  void sum_owned_gradients(const PipelineRanks& ranks);

  IntVector<OfStage> stages_;
  std::vector<torch::Tensor> shared_;  // used by several stages
};

}  // namespace lockstep
