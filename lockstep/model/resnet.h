// model/resnet.h: residual networks of 18, 34 and 50 layers, for ImageNet's images and for small ones.
//
// Source:  He et al., "Deep residual learning for image recognition" (CVPR 2016), in the form and with the parameter
//          names of torchvision.models.resnet18, 34 and 50 (50: the stride in the 3x3 convolution). With 1000 classes
//          11,689,512, 21,797,672 and 25,557,032 parameters. The form for 32x32 images begins with a 3x3 convolution of
//          stride 1 and no pooling; with 10 classes 11,173,962, 21,282,122 and 23,520,842.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <cstdint>
#include <vector>

#include "lockstep/model/stage.h"

namespace lockstep {

struct ResNetOptions {
  int layers = 18;  // 18, 34 or 50
  std::int64_t classes = 1000;
  bool small_images = false;  // the form for 32x32
};

// Two 3x3 convolutions, or 1x1, 3x3, 1x1 with four times the channels at the end ("bottleneck"), plus what came in.
class ResidualBlockImpl : public torch::nn::Module {
 public:
  ResidualBlockImpl(std::int64_t in, std::int64_t width, std::int64_t stride, bool bottleneck);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  void add_convolution(const torch::nn::Conv2dOptions& options);

  std::vector<torch::nn::Conv2d> convolutions_;
  std::vector<torch::nn::BatchNorm2d> norms_;
  torch::nn::Sequential downsample_{nullptr};  // where the shape changes
};
TORCH_MODULE(ResidualBlock);

class ResNetImpl : public torch::nn::Module {
 public:
  explicit ResNetImpl(const ResNetOptions& options = {});  // throws UsageError: another number of layers
  // images: (B, 3, H, W), 224 x 224 as published -> logits (B, classes)
  torch::Tensor forward(const torch::Tensor& images);
  std::vector<Stage> stages();  // the stem, each residual block, the head: 10 for ResNet-18, 18 for ResNet-34 and -50

 private:
  torch::Tensor stem(const torch::Tensor& images);
  torch::Tensor head(const torch::Tensor& x);

  bool small_images_;
  torch::nn::Conv2d conv1_;
  torch::nn::BatchNorm2d bn1_;
  std::array<torch::nn::Sequential, 4> groups_;
  torch::nn::Linear fc_{nullptr};
};
TORCH_MODULE(ResNet);

}  // namespace lockstep
