// model/alexnet.h: AlexNet, large in its dense layers and small in its arithmetic.
//
// conv 64@11x11/4 -> pool -> conv 192@5x5 -> pool -> conv 384, 256, 256@3x3 -> pool -> dense 4096 -> 4096 -> classes,
// ReLU after each, dropout before the first two dense layers. 61,100,840 parameters with 1000 classes.
// Source:  Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), in the form and with
//          the parameter names of torchvision.models.alexnet
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

#include "lockstep/model/stage.h"

namespace lockstep {

struct AlexNetOptions {
  std::int64_t classes = 1000;
  double dropout = 0.5;
};

class AlexNetImpl : public torch::nn::Module {
 public:
  explicit AlexNetImpl(const AlexNetOptions& options = {});
  // images: (B, 3, H, W), H and W at least 63, 224 as published -> logits (B, classes)
  torch::Tensor forward(const torch::Tensor& images);
  std::vector<Stage> stages();  // one per convolution or dense layer, with what follows it

 private:
  torch::nn::Sequential features_;
  torch::nn::Sequential classifier_;
};
TORCH_MODULE(AlexNet);

}  // namespace lockstep
