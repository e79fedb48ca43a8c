#include "lockstep/models.h"

#include <torch/nn/init.h>
#include <torch/nn/modules/pooling.h>

namespace lockstep {
namespace {

using torch::nn::Conv2dOptions;

struct BlockRow {
  const char* name;
  InceptionChannels channels;
  std::int64_t pool_before;  // window of a max-pool of stride 2 before the block; 0: none
};

// Table 1 of the paper.
constexpr BlockRow kBlocks[] = {
    {"inception3a", {192, 64, 96, 128, 16, 32, 32}, 0},     {"inception3b", {256, 128, 128, 192, 32, 96, 64}, 0},
    {"inception4a", {480, 192, 96, 208, 16, 48, 64}, 3},    {"inception4b", {512, 160, 112, 224, 24, 64, 64}, 0},
    {"inception4c", {512, 128, 128, 256, 24, 64, 64}, 0},   {"inception4d", {512, 112, 144, 288, 32, 64, 64}, 0},
    {"inception4e", {528, 256, 160, 320, 32, 128, 128}, 0}, {"inception5a", {832, 256, 160, 320, 32, 128, 128}, 2},
    {"inception5b", {832, 384, 192, 384, 48, 128, 128}, 0},
};

torch::Tensor max_pool(const torch::Tensor& x, std::int64_t window) {
  return torch::max_pool2d(x, window, /*stride=*/2, /*padding=*/0, /*dilation=*/1, /*ceil_mode=*/true);
}

ConvNorm conv(std::int64_t in, std::int64_t out, std::int64_t window) {
  return ConvNorm(Conv2dOptions(in, out, window).padding(window / 2));
}

// As torchvision starts them: normal with deviation 0.01, cut at two deviations.
void initialise(torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& weight : model.parameters())
    if (weight.dim() > 1) weight.normal_(0, 0.01).clamp_(-0.02, 0.02);
}

}  // namespace

ConvNormImpl::ConvNormImpl(const Conv2dOptions& options)
    : conv_(register_module("conv", torch::nn::Conv2d(Conv2dOptions(options).bias(false)))),
      bn_(register_module("bn",
                          torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(options.out_channels()).eps(0.001)))) {}

torch::Tensor ConvNormImpl::forward(const torch::Tensor& x) { return bn_->forward(conv_->forward(x)).relu_(); }

InceptionBlockImpl::InceptionBlockImpl(const InceptionChannels& c)
    : branch1_(register_module("branch1", conv(c.in, c.one, 1))),
      branch2_(register_module(
          "branch2", torch::nn::Sequential(conv(c.in, c.three_reduced, 1), conv(c.three_reduced, c.three, 3)))),
      branch3_(register_module("branch3",
                               torch::nn::Sequential(conv(c.in, c.five_reduced, 1), conv(c.five_reduced, c.five, 3)))),
      branch4_(register_module(
          "branch4", torch::nn::Sequential(
                         torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(1).padding(1).ceil_mode(true)),
                         conv(c.in, c.pooled, 1)))) {}

torch::Tensor InceptionBlockImpl::forward(const torch::Tensor& x) {
  return torch::cat({branch1_->forward(x), branch2_->forward(x), branch3_->forward(x), branch4_->forward(x)}, 1);
}

InceptionImpl::InceptionImpl(const InceptionOptions& options)
    : conv1_(register_module("conv1", ConvNorm(Conv2dOptions(3, 64, 7).stride(2).padding(3)))),
      conv2_(register_module("conv2", conv(64, 64, 1))),
      conv3_(register_module("conv3", conv(64, 192, 3))),
      dropout_(options.dropout),
      fc_(nullptr) {
  for (const BlockRow& row : kBlocks) blocks_.push_back(register_module(row.name, InceptionBlock(row.channels)));
  register_module("dropout", dropout_);
  fc_ = register_module("fc", torch::nn::Linear(1024, options.classes));
  initialise(*this);
}

torch::Tensor InceptionImpl::stem(const torch::Tensor& images) {
  const torch::Tensor x = max_pool(conv1_(images), 3);
  return max_pool(conv3_(conv2_(x)), 3);
}

torch::Tensor InceptionImpl::head(const torch::Tensor& x) {
  return fc_(dropout_(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1)));
}

torch::Tensor InceptionImpl::forward(const torch::Tensor& images) { return run_stages(stages(), images); }

std::vector<Stage> InceptionImpl::stages() {
  std::vector<Stage> stages;
  stages.push_back(make_stage("stem", {conv1_.get(), conv2_.get(), conv3_.get()},
                              [this](const torch::Tensor& images) { return stem(images); }));
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const BlockRow& row = kBlocks[i];
    stages.push_back(
        make_stage(row.name, {blocks_[i].get()}, [block = blocks_[i], &row](const torch::Tensor& x) mutable {
          return block->forward(row.pool_before == 0 ? x : max_pool(x, row.pool_before));
        }));
  }
  stages.push_back(make_stage("head", {dropout_.get(), fc_.get()}, [this](const torch::Tensor& x) { return head(x); }));
  return stages;
}

}  // namespace lockstep
