// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include <torch/nn/modules/linear.h>

namespace lockstep {

MLPImpl::MLPImpl(const MLPOptions& options) : layers_(register_module("layers", torch::nn::Sequential())) {
  std::int64_t width = options.inputs;
  for (const std::int64_t next : options.hidden) {
    layers_->push_back(torch::nn::Linear(width, next));
    width = next;
  }
  layers_->push_back(torch::nn::Linear(width, options.outputs));
}

torch::Tensor MLPImpl::forward(const torch::Tensor& data) { return run_pieces(pieces(), data); }

std::vector<Piece> MLPImpl::pieces() {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < layers_->size(); ++i) {
    auto* linear = layers_[i]->as<torch::nn::Linear>();
    const bool last = i + 1 == layers_->size();
    pieces.push_back(make_piece("layers." + std::to_string(i), {linear}, [linear, last](const torch::Tensor& x) {
      const torch::Tensor y = linear->forward(x.flatten(1));
      return last ? y : y.relu();
    }));
  }
  return pieces;
}

}  // namespace lockstep
