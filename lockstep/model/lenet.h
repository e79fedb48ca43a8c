// model/lenet.h: the convolutional network of S0.
//
// conv 20@3x3 -> ReLU -> avg-pool 2 -> conv 50@5x5 -> ReLU -> avg-pool 2 -> dense 128 -> ReLU -> dense 10.
// 129,068 parameters. After LeCun et al., "Gradient-based learning applied to document recognition" (1998), in the
// widths of S0.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <vector>

#include "lockstep/model/stage.h"

namespace lockstep {

class LeNetImpl : public torch::nn::Module {
 public:
  LeNetImpl();
  // images: (B, 1, 28, 28) -> logits (B, 10)
  torch::Tensor forward(const torch::Tensor& images);
  std::vector<Stage> stages();  // one per layer

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::Conv2d conv2_;
  torch::nn::Linear fc1_;
  torch::nn::Linear fc2_;
};
TORCH_MODULE(LeNet);

}  // namespace lockstep
