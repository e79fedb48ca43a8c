// SPDX-License-Identifier: Apache-2.0
#include <torch/nn/modules/pooling.h>

#include "lockstep/models.h"

namespace lockstep {
namespace {

namespace nn = torch::nn;

// Channels of a block: those that come in, and those of its branches.
struct BlockChannels {
  int64_t in, one, three_reduced, three, five_reduced, five, pooled;
};

struct BlockRow {
  const char* name;
  BlockChannels channels;
  int64_t pool_before;  // window of a max-pool of stride 2 before the block; 0: none
};

// Table 1 of the paper.
constexpr BlockRow kBlocks[] = {
    {"inception3a", {192, 64, 96, 128, 16, 32, 32}, 0},     {"inception3b", {256, 128, 128, 192, 32, 96, 64}, 0},
    {"inception4a", {480, 192, 96, 208, 16, 48, 64}, 3},    {"inception4b", {512, 160, 112, 224, 24, 64, 64}, 0},
    {"inception4c", {512, 128, 128, 256, 24, 64, 64}, 0},   {"inception4d", {512, 112, 144, 288, 32, 64, 64}, 0},
    {"inception4e", {528, 256, 160, 320, 32, 128, 128}, 0}, {"inception5a", {832, 256, 160, 320, 32, 128, 128}, 2},
    {"inception5b", {832, 384, 192, 384, 48, 128, 128}, 0},
};

Tensor max_pool(const Tensor& x, int64_t window) {
  return torch::max_pool2d(x, window, /*stride=*/2, /*padding=*/0, /*dilation=*/1, /*ceil_mode=*/true);
}

nn::Conv2dOptions window(int64_t in, int64_t out, int64_t size) {
  return nn::Conv2dOptions(in, out, size).padding(size / 2);
}

// Initialises as torchvision does: normal with deviation 0.01, cut at two deviations.
void cut_normal(nn::Module& model) {
  const torch::NoGradGuard no_grad;
  for (Tensor& weight : model.parameters())
    if (weight.dim() > 1) weight.normal_(0, 0.01).clamp_(-0.02, 0.02);
}

// Convolution without bias, batch normalisation, ReLU.
class ConvNorm : public nn::Module {
 public:
  explicit ConvNorm(const nn::Conv2dOptions& options)
      : conv_(register_module("conv", nn::Conv2d(nn::Conv2dOptions(options).bias(false)))),
        bn_(register_module("bn", nn::BatchNorm2d(nn::BatchNorm2dOptions(options.out_channels()).eps(0.001)))) {}

  Tensor forward(const Tensor& x) { return bn_->forward(conv_->forward(x)).relu_(); }

 private:
  nn::Conv2d conv_;
  nn::BatchNorm2d bn_;
};

// Four branches beside each other: 1x1; 1x1 then 3x3; 1x1 then 3x3 (published as 5x5); pool then 1x1.
class InceptionBlock : public nn::Module {
 public:
  explicit InceptionBlock(const BlockChannels& c)
      : branch1_(register_module("branch1", std::make_shared<ConvNorm>(window(c.in, c.one, 1)))),
        branch2_(register_module("branch2", nn::Sequential(ConvNorm(window(c.in, c.three_reduced, 1)),
                                                           ConvNorm(window(c.three_reduced, c.three, 3))))),
        branch3_(register_module("branch3", nn::Sequential(ConvNorm(window(c.in, c.five_reduced, 1)),
                                                           ConvNorm(window(c.five_reduced, c.five, 3))))),
        branch4_(register_module(
            "branch4", nn::Sequential(nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(1).padding(1).ceil_mode(true)),
                                      ConvNorm(window(c.in, c.pooled, 1))))) {}

  // (B, in, H, W) -> (B, one + three + five + pooled, H, W)
  Tensor forward(const Tensor& x) {
    return torch::cat({branch1_->forward(x), branch2_->forward(x), branch3_->forward(x), branch4_->forward(x)}, 1);
  }

 private:
  std::shared_ptr<ConvNorm> branch1_;
  nn::Sequential branch2_;
  nn::Sequential branch3_;
  nn::Sequential branch4_;
};

}  // namespace

InceptionImpl::InceptionImpl(const InceptionOptions& options) {
  const auto conv1 =
      register_module("conv1", std::make_shared<ConvNorm>(nn::Conv2dOptions(3, 64, 7).stride(2).padding(3)));
  const auto conv2 = register_module("conv2", std::make_shared<ConvNorm>(window(64, 64, 1)));
  const auto conv3 = register_module("conv3", std::make_shared<ConvNorm>(window(64, 192, 3)));
  add_piece("stem", {conv1.get(), conv2.get(), conv3.get()}, [conv1, conv2, conv3](const Tensor& images) {
    const Tensor x = max_pool(conv1->forward(images), 3);
    return max_pool(conv3->forward(conv2->forward(x)), 3);
  });
  for (const BlockRow& row : kBlocks) {
    const auto block = register_module(row.name, std::make_shared<InceptionBlock>(row.channels));
    add_piece(row.name, {block.get()}, [block, &row](const Tensor& x) {
      return block->forward(row.pool_before == 0 ? x : max_pool(x, row.pool_before));
    });
  }
  const auto dropout = register_module("dropout", nn::Dropout(options.dropout));
  const auto fc = register_module("fc", nn::Linear(1024, options.classes));
  add_piece("head", {dropout.get(), fc.get()}, [dropout, fc](const Tensor& x) {
    return fc->forward(dropout->forward(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1)));
  });
  cut_normal(*this);
}

}  // namespace lockstep
