// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/stage_parameters.h: which parameters and buffers each stage has, and how ranks with a stage each keep
// them the same: gradients of replicas and of parameters that several stages use.
//
// Flow:    pieces and their cut -> here -> World
// Owns:    references to the model's parameters and buffers; a world for each set of stages that share a parameter
// Threads: one
// Ranks:   every rank makes the same calls with the same cut
#pragma once

#include <map>
#include <vector>

#include "lockstep/named_tensor.h"
#include "lockstep/optimizer.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/world.h"

namespace lockstep {

// The ranks of a pipeline: rank i has stage i % p of replica i / p.
struct PipelineRanks {
  World all;
  World of_stage;    // the replicas of this rank's stage
  World of_replica;  // the stages of this rank's replica: stage s is its rank s
  World back;        // the same for gradients: between GPUs a message holds up those behind it on its connection
};

// A parameter or buffer of the model.
struct StagedTensor {
  NamedTensor named;
  std::vector<int> stages;  // whose pieces use it; all, if no piece does
  bool is_buffer = false;

  bool is_used_by(int stage) const;
};
using StagedTensors = std::vector<StagedTensor>;

// In the model's order: parameters, then buffers.
StagedTensors stage_tensors(const torch::nn::Module& model, const std::vector<Piece>& pieces, const Cut& cut);

std::vector<torch::Tensor> tensors_of(const StagedTensors& all, int stage);

// Bytes of each piece's parameters and buffers, and 1.
std::vector<double> bytes_of(const std::vector<Piece>& pieces);

// Gives the stages of each replica what they have in `after` and did not have in `before`, tensor by tensor, with the
// optimizer's state, and frees what they have no more. Returns the state of this rank's parameters. Sends what moves.
// Blocks. Throws PeerLost.
using OptimizerStates = std::map<const void*, Optimizer::StateTensors>;  // TensorImpl -> state
OptimizerStates move_tensors(const StagedTensors& before, const StagedTensors& after, const PipelineRanks& ranks,
                             const Optimizer& optimizer);

class StageParameters {
 public:
  // Blocks: makes worlds. Throws PeerLost.
  StageParameters(StagedTensors tensors, const PipelineRanks& ranks);

  // Gives every rank of a stage the sum of the replicas' gradients, and every stage that uses a shared parameter the sum
  // of those stages' gradients. One all_reduce per parameter; sends 2(n-1)/n K over the n ranks that use it. A missing
  // gradient counts as zero; a parameter without a gradient on any of them keeps none. Throws PeerLost.
  void sum_gradients();

  // Every rank of a stage gets the parameters and buffers, or the buffers, of the first replica; every stage that uses a
  // shared parameter those of the first stage that does. Sends K of the stage. Throws PeerLost.
  void broadcast() const;
  void broadcast_buffers() const;

 private:
  struct Group {
    World world;
    std::vector<NamedTensor> parameters;
  };

  std::vector<Group> groups_;  // ranks that use the same parameters: this stage's alone, then shared ones
  std::vector<NamedTensor> buffers_;
  World of_stage_;
};

}  // namespace lockstep
