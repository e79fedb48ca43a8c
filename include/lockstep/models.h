// SPDX-License-Identifier: Apache-2.0
// lockstep/models.h: the models that come with lockstep.
//
// Flow:    model_task("resnet18"), or classification_task<ResNet>(...) -> a Task -> lockstep::run(), a strategy
// Owns:    a model its parameters and buffers, as any torch::nn::Module
// Threads: one thread per model
// Ranks:   no communication
//
// Parameters have the names they have in torchvision or Hugging Face, so that their weights fit.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "lockstep/task.h"

namespace lockstep {

// The models that `lockstep train --model` knows: lenet, mlp, mlp-wide, alexnet, inception, resnet18, resnet34,
// resnet50, the same with -32 for 32x32 images and 10 classes, gpt2, and over bytes gpt-mini: 4 layers of width 128, for a
// CPU, and gpt-char: 6 layers of width 384, as nanoGPT has for characters.
std::vector<std::string> model_names();

// For the samples that the model was published with; Task::fit adapts it to others. A name that ends in .pt is a file of
// script_task(). Throws UsageError naming the models there are.
Task model_task(const std::string& name);

// A model in TorchScript (lockstep/script_module.h), of one tensor in and one out: classes in its last dimension, or numbers,
// as the targets are, with cross entropy or the mean squared error. It takes whatever samples the data has.
Task script_task(const std::string& file);

// A model that runs its pieces one after another: the finest cut that it allows, for pipelines.
class PiecewiseModule : public torch::nn::Module {
 public:
  Tensor forward(const Tensor& data) { return run_pieces(pieces_, data); }
  const std::vector<Piece>& pieces() const { return pieces_; }

 protected:
  // The next piece, of one tensor in and one out.
  void add_piece(std::string name, std::vector<torch::nn::Module*> modules,
                 std::function<Tensor(const Tensor&)> forward) {
    pieces_.push_back(make_piece(std::move(name), std::move(modules), std::move(forward)));
  }

 private:
  std::vector<Piece> pieces_;
};

struct LeNetOptions {
  int64_t channels = 1;
  int64_t height = 28;
  int64_t width = 28;
  int64_t classes = 10;
};

// conv 20@3x3 -> ReLU -> avg-pool 2 -> conv 50@5x5 -> ReLU -> avg-pool 2 -> dense 128 -> ReLU -> dense 10.
// 129,068 parameters for grey images of 28 x 28. After LeCun et al., "Gradient-based learning applied to document
// recognition" (1998), with the widths of Zhang et al., "Dive into Deep Learning", section "Training on Multiple GPUs".
class LeNetImpl : public PiecewiseModule {
 public:
  // images: (B, channels, height, width) -> logits (B, classes); a piece per layer. Throws UsageError: below 14 x 14
  explicit LeNetImpl(const LeNetOptions& options = {});
};
TORCH_MODULE(LeNet);

struct MLPOptions {
  int64_t inputs = 784;
  std::vector<int64_t> hidden = {512, 512};
  int64_t outputs = 10;
};

// Dense layers with ReLU between them (Rumelhart, Hinton and Williams, "Learning representations by back-propagating
// errors", 1986). With its defaults 784 -> 512 -> 512 -> 10: 669,706 parameters.
class MLPImpl : public PiecewiseModule {
 public:
  // (B, ...) with `inputs` values per sample -> logits (B, outputs); a piece per dense layer
  explicit MLPImpl(const MLPOptions& options = {});
};
TORCH_MODULE(MLP);

struct AlexNetOptions {
  int64_t classes = 1000;
  double dropout = 0.5;
};

// conv 64@11x11/4 -> pool -> conv 192@5x5 -> pool -> conv 384, 256, 256@3x3 -> pool -> dense 4096 -> 4096 -> classes,
// ReLU after each, dropout before the first two dense layers. 61,100,840 parameters with 1000 classes, most of them in
// the dense layers. Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), in the form
// and with the parameter names of torchvision.models.alexnet.
class AlexNetImpl : public PiecewiseModule {
 public:
  // images: (B, 3, H, W), H and W at least 63, 224 as published -> logits (B, classes); a piece per convolution or dense
  // layer, with what follows it
  explicit AlexNetImpl(const AlexNetOptions& options = {});
};
TORCH_MODULE(AlexNet);

struct InceptionOptions {
  int64_t classes = 1000;
  double dropout = 0.2;
};

// Inception v1 (GoogLeNet): many small convolutions in parallel branches, few parameters: 6,624,904 with 1000 classes.
// Szegedy et al., "Going deeper with convolutions" (CVPR 2015), in the form and with the parameter names of
// torchvision.models.googlenet: batch normalisation after each convolution, 3x3 in place of 5x5 in the third branch, no
// auxiliary heads.
class InceptionImpl : public PiecewiseModule {
 public:
  // images: (B, 3, H, W), H and W at least 15, 224 as published -> logits (B, classes); pieces: the stem, each block, the
  // head
  explicit InceptionImpl(const InceptionOptions& options = {});
};
TORCH_MODULE(Inception);

struct ResNetOptions {
  int layers = 18;  // 18, 34 or 50
  int64_t classes = 1000;
  bool small_images = false;  // the form for 32x32
};

// Residual networks: He et al., "Deep residual learning for image recognition" (CVPR 2016), in the form and with the
// parameter names of torchvision.models.resnet18, 34 and 50 (50: the stride in the 3x3 convolution). With 1000 classes
// 11,689,512, 21,797,672 and 25,557,032 parameters. The form for 32x32 images begins with a 3x3 convolution of stride 1
// and no pooling; with 10 classes 11,173,962, 21,282,122 and 23,520,842.
class ResNetImpl : public PiecewiseModule {
 public:
  // images: (B, 3, H, W), 224 x 224 as published -> logits (B, classes); pieces: the stem, each residual block, the head:
  // 10 for ResNet-18, 18 for ResNet-34 and -50
  explicit ResNetImpl(const ResNetOptions& options = {});  // throws UsageError: another number of layers
};
TORCH_MODULE(ResNet);

struct GPTOptions {
  int64_t vocabulary = 50257;
  int64_t context = 1024;  // tokens in a sequence at most
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t width = 768;  // a multiple of heads
  double dropout = 0.1;
};

// A decoder-only transformer in the form of GPT-2 (Radford et al., "Language models are unsupervised multitask
// learners", 2019): tokens -> embedding + position -> blocks of (norm, causal attention, + ; norm, dense 4x, GELU,
// dense, +) -> norm -> times the embedding. With its defaults (GPT-2 small) 124,439,808 parameters.
class GPTImpl : public PiecewiseModule {
 public:
  // tokens: (B, T) int64, T up to the context -> logits of the next token (B, T, vocabulary); pieces: the embeddings, each
  // block, the head (which uses the token embedding again)
  explicit GPTImpl(const GPTOptions& options = {});  // throws UsageError: heads that do not divide the width
};
TORCH_MODULE(GPT);

// Predicts the next token of each position of (B, T) tokens; the loss is the mean over all B * T of them, and a sample
// counts as correct by the share of its tokens that are.
Task gpt_task(const std::string& name, const GPTOptions& options);

}  // namespace lockstep
