// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include <torch/nn/init.h>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace nn = torch::nn;

struct Depth {
  std::array<int, 4> blocks;
  bool bottleneck;
};

// Table 1 of the paper.
Depth depth_of(int layers) {
  if (layers == 18) return {{2, 2, 2, 2}, false};
  if (layers == 34) return {{3, 4, 6, 3}, false};
  if (layers == 50) return {{3, 4, 6, 3}, true};
  throw UsageError({.what = concat("no ResNet of ", layers, " layers"), .next = "18, 34 or 50"});
}

nn::Conv2dOptions conv_options(int64_t in, int64_t out, int64_t window, int64_t stride = 1) {
  return nn::Conv2dOptions(in, out, window).stride(stride).padding(window / 2).bias(false);
}

int64_t channels_out(int64_t width, bool bottleneck) { return bottleneck ? 4 * width : width; }

// He et al., "Delving deep into rectifiers" (2015).
void initialise_kaiming(nn::Module& model) {
  for (Tensor& weight : model.parameters())
    if (weight.dim() == 4) nn::init::kaiming_normal_(weight, 0, torch::kFanOut, torch::kReLU);
}

// Two 3x3 convolutions, or 1x1, 3x3, 1x1 with four times the channels at the end ("bottleneck"), plus the input.
class ResidualBlock : public nn::Module {
 public:
  ResidualBlock(int64_t in, int64_t width, int64_t stride, bool bottleneck) {
    const int64_t out = channels_out(width, bottleneck);
    if (bottleneck) {
      add_convolution(conv_options(in, width, 1));
      add_convolution(conv_options(width, width, 3, stride));
      add_convolution(conv_options(width, out, 1));
    } else {
      add_convolution(conv_options(in, width, 3, stride));
      add_convolution(conv_options(width, width, 3));
    }
    if (stride != 1 || in != out)
      downsample_ = register_module("downsample",
                                    nn::Sequential(nn::Conv2d(conv_options(in, out, 1, stride)), nn::BatchNorm2d(out)));
  }

  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (size_t i = 0; i < convolutions_.size(); ++i) {
      y = norms_[i]->forward(convolutions_[i]->forward(y));
      if (i + 1 < convolutions_.size()) y.relu_();
    }
    return (y + (downsample_.is_empty() ? x : downsample_->forward(x))).relu_();
  }

 private:
  void add_convolution(const nn::Conv2dOptions& options) {
    const std::string number = std::to_string(convolutions_.size() + 1);
    convolutions_.push_back(register_module("conv" + number, nn::Conv2d(options)));
    norms_.push_back(register_module("bn" + number, nn::BatchNorm2d(options.out_channels())));
  }

  std::vector<nn::Conv2d> convolutions_;
  std::vector<nn::BatchNorm2d> norms_;
  nn::Sequential downsample_{nullptr};  // where the shape changes
};

}  // namespace

ResNetImpl::ResNetImpl(const ResNetOptions& options) {
  const Depth depth = depth_of(options.layers);
  const bool small = options.small_images;
  const auto conv1 = register_module("conv1", nn::Conv2d(small ? conv_options(3, 64, 3) : conv_options(3, 64, 7, 2)));
  const auto bn1 = register_module("bn1", nn::BatchNorm2d(64));
  add_piece("stem", {conv1.get(), bn1.get()}, [conv1, bn1, small](const Tensor& images) {
    const Tensor x = bn1->forward(conv1->forward(images)).relu_();
    return small ? x : torch::max_pool2d(x, 3, /*stride=*/2, /*padding=*/1);
  });
  int64_t channels = 64;
  for (size_t group = 0; group < depth.blocks.size(); ++group) {
    const std::string name = concat("layer", group + 1);
    const auto blocks = register_module(name, nn::Sequential());
    const int64_t width = int64_t{64} << group;
    for (int i = 0; i < depth.blocks[group]; ++i) {
      const int64_t stride = i == 0 && group > 0 ? 2 : 1;
      const auto block = std::make_shared<ResidualBlock>(channels, width, stride, depth.bottleneck);
      blocks->push_back(block);
      add_piece(concat(name, ".", i), {block.get()}, [block](const Tensor& x) { return block->forward(x); });
      channels = channels_out(width, depth.bottleneck);
    }
  }
  const auto fc = register_module("fc", nn::Linear(channels, options.classes));
  add_piece("head", {fc.get()}, [fc](const Tensor& x) {
    return fc->forward(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  });
  initialise_kaiming(*this);
}

}  // namespace lockstep
