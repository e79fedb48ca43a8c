// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/cut.h: which pieces of a model each stage of a pipeline has, and which parameters and buffers it
// uses.
//
// Threads: pure functions; measure_pieces runs the model on the calling thread
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/named_tensor.h"
#include "lockstep/sampler.h"
#include "lockstep/task.h"

namespace lockstep {

using Cut = IntVector<Range>;  // of pieces, one range per stage, without gaps

// The model's pieces: Task::stages, or the modules of a Sequential. Throws UsageError: a model that can't be cut.
std::vector<Piece> pieces_of(const Task& task, torch::nn::Module& model);

// The meaning of --stages: how many there are, and the cut if it names one.
struct StagesOption {
  int stages = 0;
  Cut cut;  // empty: to be balanced
};
// "" is one stage per device; "3" is three; "0-3,4-9" names the pieces of each.
// Throws UsageError: pieces left out, named twice or not there, or a number of stages that does not divide the devices.
StagesOption parse_stages(const std::string& text, int devices, int pieces);

// The cut into `stages` ranges that minimises the cost of the dearest one; every stage gets a piece. Of several such
// cuts, the one whose last stages begin earliest. Throws UsageError: more stages than pieces.
Cut balanced_cut(const std::vector<double>& costs, int stages);

// Seconds of each piece, forward and backward, on these inputs of the first: the median of three runs, in evaluation
// mode, so that neither running statistics nor random numbers change. Clears the model's gradients. Afterwards
// `tensors` are what the last piece returned.
std::vector<double> measure_pieces(const std::vector<Piece>& pieces, torch::nn::Module& model, Tensors& tensors);

std::vector<Piece> pieces_in(const std::vector<Piece>& pieces, const Range& range);

// Runs the pieces one after the other.
Tensors through(const std::vector<Piece>& pieces, Tensors tensors);

std::string to_string(const Cut& cut);  // "0-3,4-9"

// A parameter or buffer of the model.
struct StagedTensor {
  NamedTensor named;
  std::vector<int> stages;  // whose pieces use it; all, if no piece does
  bool is_buffer = false;

  bool is_used_by(int stage) const;
};
using StagedTensors = std::vector<StagedTensor>;

// Lists them in the model's order: parameters, then buffers.
StagedTensors stage_tensors(const torch::nn::Module& model, const std::vector<Piece>& pieces, const Cut& cut);

// Bytes of each piece's parameters and buffers, and 1.
std::vector<double> bytes_of(const std::vector<Piece>& pieces);

}  // namespace lockstep
