// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

namespace lockstep {
namespace {

using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;
using torch::nn::Dropout;
using torch::nn::Linear;

torch::nn::ReLU relu() { return torch::nn::ReLU(torch::nn::ReLUOptions(/*inplace=*/true)); }
torch::nn::MaxPool2d pool() { return torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2)); }

torch::nn::Sequential make_features() {
  return torch::nn::Sequential(Conv2d(Conv2dOptions(3, 64, 11).stride(4).padding(2)), relu(), pool(),
                               Conv2d(Conv2dOptions(64, 192, 5).padding(2)), relu(), pool(),
                               Conv2d(Conv2dOptions(192, 384, 3).padding(1)), relu(),
                               Conv2d(Conv2dOptions(384, 256, 3).padding(1)), relu(),
                               Conv2d(Conv2dOptions(256, 256, 3).padding(1)), relu(), pool());
}

torch::nn::Sequential make_classifier(const AlexNetOptions& options) {
  return torch::nn::Sequential(Dropout(options.dropout), Linear(256 * 6 * 6, 4096), relu(), Dropout(options.dropout),
                               Linear(4096, 4096), relu(), Linear(4096, options.classes));
}

// Modules [begin, end) of a Sequential as one piece.
Piece piece_of_range(const std::string& name, torch::nn::SequentialImpl& all, std::size_t begin, std::size_t end) {
  std::vector<torch::nn::Module*> modules;
  for (std::size_t i = begin; i < end; ++i) modules.push_back(all[i].get());
  return make_piece(name + "." + std::to_string(begin), modules, [&all, begin, end](torch::Tensor x) {
    for (auto module = all.begin() + static_cast<std::ptrdiff_t>(begin);
         module != all.begin() + static_cast<std::ptrdiff_t>(end); ++module)
      x = module->forward<torch::Tensor>(x);
    return x;
  });
}

torch::Tensor pooled_and_flat(const torch::Tensor& x) { return torch::adaptive_avg_pool2d(x, {6, 6}).flatten(1); }

}  // namespace

AlexNetImpl::AlexNetImpl(const AlexNetOptions& options)
    : features_(register_module("features", make_features())),
      classifier_(register_module("classifier", make_classifier(options))) {}

torch::Tensor AlexNetImpl::forward(const torch::Tensor& images) {
  return classifier_->forward(pooled_and_flat(features_->forward(images)));
}

std::vector<Piece> AlexNetImpl::pieces() {
  std::vector<Piece> pieces;
  const std::vector<std::size_t> convolutions = {0, 3, 6, 8, 10, features_->size()};
  for (std::size_t i = 0; i + 1 < convolutions.size(); ++i)
    pieces.push_back(piece_of_range("features", *features_, convolutions[i], convolutions[i + 1]));
  pieces.push_back(make_piece("pool", {}, pooled_and_flat));
  const std::vector<std::size_t> dense = {0, 3, 6, classifier_->size()};
  for (std::size_t i = 0; i + 1 < dense.size(); ++i)
    pieces.push_back(piece_of_range("classifier", *classifier_, dense[i], dense[i + 1]));
  return pieces;
}

}  // namespace lockstep
