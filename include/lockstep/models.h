// lockstep/models.h: the models that lockstep brings along.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/task.h"

// ---- the convolutional network of S0.
//
// conv 20@3x3 -> ReLU -> avg-pool 2 -> conv 50@5x5 -> ReLU -> avg-pool 2 -> dense 128 -> ReLU -> dense 10.
// 129,068 parameters. After LeCun et al., "Gradient-based learning applied to document recognition" (1998), in the
// widths of S0.

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

// ---- AlexNet, large in its dense layers and small in its arithmetic.
//
// conv 64@11x11/4 -> pool -> conv 192@5x5 -> pool -> conv 384, 256, 256@3x3 -> pool -> dense 4096 -> 4096 -> classes,
// ReLU after each, dropout before the first two dense layers. 61,100,840 parameters with 1000 classes.
// Source:  Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), in the form and with
//          the parameter names of torchvision.models.alexnet

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

// ---- Inception v1 (GoogLeNet): many small convolutions in parallel branches, few parameters.
//
// Source:  Szegedy et al., "Going deeper with convolutions" (CVPR 2015), in the form and with the parameter names of
//          torchvision.models.googlenet: batch normalisation after each convolution, 3x3 in place of 5x5 in the third
//          branch, no auxiliary heads. 6,624,904 parameters with 1000 classes.

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

// ---- residual networks of 18, 34 and 50 layers, for ImageNet's images and for small ones.
//
// Source:  He et al., "Deep residual learning for image recognition" (CVPR 2016), in the form and with the parameter
//          names of torchvision.models.resnet18, 34 and 50 (50: the stride in the 3x3 convolution). With 1000 classes
//          11,689,512, 21,797,672 and 25,557,032 parameters. The form for 32x32 images begins with a 3x3 convolution of
//          stride 1 and no pooling; with 10 classes 11,173,962, 21,282,122 and 23,520,842.

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

// ---- a multi-layer perceptron: dense layers with ReLU between them.
//
// With its defaults 784 -> 512 -> 512 -> 10: 669,706 parameters.
// Source:  Rumelhart, Hinton and Williams, "Learning representations by back-propagating errors" (1986)

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

// ---- a decoder-only transformer in the form of GPT-2, its output layer tied to its token embedding.
//
// tokens -> embedding + position -> blocks of (norm, causal attention, + ; norm, dense 4x, GELU, dense, +) -> norm ->
// times the embedding. With its defaults (GPT-2 small) 124,439,808 parameters.
// Source:  Radford et al., "Language models are unsupervised multitask learners" (2019)

namespace lockstep {

struct GPTOptions {
  std::int64_t vocabulary = 50257;
  std::int64_t context = 1024;  // tokens in a sequence at most
  std::int64_t layers = 12;
  std::int64_t heads = 12;
  std::int64_t width = 768;  // a multiple of heads
  double dropout = 0.1;
};

class GPTBlockImpl : public torch::nn::Module {
 public:
  explicit GPTBlockImpl(const GPTOptions& options);
  torch::Tensor forward(const torch::Tensor& x);  // (B, T, width) -> the same

 private:
  torch::Tensor attend(const torch::Tensor& x);
  torch::Tensor drop(const torch::Tensor& x) const;

  std::int64_t heads_;
  double dropout_;
  torch::nn::LayerNorm ln_1_;
  torch::nn::Linear c_attn_;  // query, key and value in one
  torch::nn::Linear attn_proj_;
  torch::nn::LayerNorm ln_2_;
  torch::nn::Linear c_fc_;
  torch::nn::Linear mlp_proj_;
};
TORCH_MODULE(GPTBlock);

class GPTImpl : public torch::nn::Module {
 public:
  explicit GPTImpl(const GPTOptions& options = {});  // throws UsageError: heads that do not divide the width
  // tokens: (B, T) int64, T up to the context -> logits of the next token (B, T, vocabulary)
  torch::Tensor forward(const torch::Tensor& tokens);
  std::vector<Stage> stages();  // the embeddings, each block, the head (which uses the token embedding again)

 private:
  torch::Tensor embed(const torch::Tensor& tokens);
  torch::Tensor head(const torch::Tensor& x);
  void initialise();

  GPTOptions options_;
  torch::nn::Embedding wte_;
  torch::nn::Embedding wpe_;
  torch::nn::ModuleList h_;
  torch::nn::LayerNorm ln_f_;
};
TORCH_MODULE(GPT);

}  // namespace lockstep

// ---- the models that `lockstep train --model` knows, each as a Task.
//
// Flow:    a name -> here -> train/builtin.h, bench/
// Threads: pure functions

namespace lockstep {

// lenet, mlp, alexnet, inception, resnet18, resnet34, resnet50, the same with -32 for 32x32 images and 10 classes,
// gpt2, and gpt-mini: 4 layers of width 128 over bytes, for a CPU.
std::vector<std::string> model_names();

Task model_task(const std::string& name);  // throws UsageError naming the models there are

// Predicts the next token of each position of (B, T) tokens; the loss is the mean over all B * T of them, and a sample
// counts as right by the share of its tokens that are.
struct GPTOptions;
Task gpt_task(const std::string& name, const GPTOptions& options);

}  // namespace lockstep
