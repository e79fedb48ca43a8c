// model/inception.h: Inception v1 (GoogLeNet): many small convolutions in parallel branches, few parameters.
//
// Source:  Szegedy et al., "Going deeper with convolutions" (CVPR 2015), in the form and with the parameter names of
//          torchvision.models.googlenet: batch normalisation after each convolution, 3x3 in place of 5x5 in the third
//          branch, no auxiliary heads. 6,624,904 parameters with 1000 classes.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

#include "lockstep/model/stage.h"

namespace lockstep {

struct InceptionOptions {
  std::int64_t classes = 1000;
  double dropout = 0.2;
};

// Convolution without bias, batch normalisation, ReLU.
class ConvNormImpl : public torch::nn::Module {
 public:
  explicit ConvNormImpl(const torch::nn::Conv2dOptions& options);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::nn::Conv2d conv_;
  torch::nn::BatchNorm2d bn_;
};
TORCH_MODULE(ConvNorm);

// Channels of one Inception block: those that come in, and those of its branches.
struct InceptionChannels {
  std::int64_t in, one, three_reduced, three, five_reduced, five, pooled;
};

// Four branches side by side: 1x1; 1x1 then 3x3; 1x1 then 3x3 (published as 5x5); pool then 1x1.
class InceptionBlockImpl : public torch::nn::Module {
 public:
  explicit InceptionBlockImpl(const InceptionChannels& channels);
  // (B, in, H, W) -> (B, one + three + five + pooled, H, W)
  torch::Tensor forward(const torch::Tensor& x);

 private:
  ConvNorm branch1_;
  torch::nn::Sequential branch2_;
  torch::nn::Sequential branch3_;
  torch::nn::Sequential branch4_;
};
TORCH_MODULE(InceptionBlock);

class InceptionImpl : public torch::nn::Module {
 public:
  explicit InceptionImpl(const InceptionOptions& options = {});
  // images: (B, 3, H, W), H and W at least 15, 224 as published -> logits (B, classes)
  torch::Tensor forward(const torch::Tensor& images);
  std::vector<Stage> stages();  // the stem, each block, the head

 private:
  torch::Tensor stem(const torch::Tensor& images);
  torch::Tensor head(const torch::Tensor& x);

  ConvNorm conv1_, conv2_, conv3_;
  std::vector<InceptionBlock> blocks_;
  torch::nn::Dropout dropout_;
  torch::nn::Linear fc_;
};
TORCH_MODULE(Inception);

}  // namespace lockstep
