// model/mlp.h: a multi-layer perceptron: dense layers with ReLU between them.
//
// With its defaults 784 -> 512 -> 512 -> 10: 669,706 parameters.
// Source:  Rumelhart, Hinton and Williams, "Learning representations by back-propagating errors" (1986)
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

#include "lockstep/model/stage.h"

namespace lockstep {

struct MLPOptions {
  std::int64_t inputs = 784;
  std::vector<std::int64_t> hidden = {512, 512};
  std::int64_t outputs = 10;
};

class MLPImpl : public torch::nn::Module {
 public:
  explicit MLPImpl(const MLPOptions& options = {});
  // (B, ...) with `inputs` values per sample -> logits (B, outputs)
  torch::Tensor forward(const torch::Tensor& data);
  std::vector<Stage> stages();  // one per dense layer

 private:
  torch::nn::Sequential layers_;
};
TORCH_MODULE(MLP);

}  // namespace lockstep
