// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/stage_tensors.h: which parameters and buffers each stage of a pipeline uses.
//
// Threads: pure functions
#pragma once

#include <vector>

#include "lockstep/named_tensor.h"
#include "lockstep/strategy/pipeline/cut.h"

namespace lockstep {

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
