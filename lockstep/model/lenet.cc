// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

namespace lockstep {

LeNetImpl::LeNetImpl()
    : conv1_(register_module("conv1", torch::nn::Conv2d(1, 20, 3))),
      conv2_(register_module("conv2", torch::nn::Conv2d(20, 50, 5))),
      fc1_(register_module("fc1", torch::nn::Linear(50 * 4 * 4, 128))),
      fc2_(register_module("fc2", torch::nn::Linear(128, 10))) {}

torch::Tensor LeNetImpl::forward(const torch::Tensor& images) {
  torch::Tensor x = torch::avg_pool2d(conv1_(images).relu_(), 2);  // (B, 20, 13, 13)
  x = torch::avg_pool2d(conv2_(x).relu_(), 2);                     // (B, 50, 4, 4)
  x = fc1_(x.flatten(1)).relu_();                                  // (B, 128)
  return fc2_(x);
}

std::vector<Piece> LeNetImpl::pieces() {
  const auto conv = [](torch::nn::Conv2d layer) {
    return [layer](const torch::Tensor& x) mutable { return torch::avg_pool2d(layer(x).relu_(), 2); };
  };
  return {make_piece("conv1", {conv1_.get()}, conv(conv1_)), make_piece("conv2", {conv2_.get()}, conv(conv2_)),
          make_piece("fc1", {fc1_.get()}, [this](const torch::Tensor& x) { return fc1_(x.flatten(1)).relu_(); }),
          make_piece("fc2", {fc2_.get()}, [this](const torch::Tensor& x) { return fc2_(x); })};
}

}  // namespace lockstep
