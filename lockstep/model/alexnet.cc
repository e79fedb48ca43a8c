// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include <torch/nn/modules/activation.h>
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

}  // namespace

AlexNetImpl::AlexNetImpl(const AlexNetOptions& options) {
  // A piece for the modules from each of `begins` to the next.
  const auto add_pieces = [this](const std::string& name, const auto& modules, std::vector<std::ptrdiff_t> begins) {
    begins.push_back(std::ssize(*modules));
    for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
      std::vector<torch::nn::AnyModule> part(modules->begin() + begins[i], modules->begin() + begins[i + 1]);
      std::vector<torch::nn::Module*> pointers;
      for (const auto& module : part) pointers.push_back(module.ptr().get());
      add_piece(name + "." + std::to_string(begins[i]), pointers, [part](torch::Tensor x) mutable {
        for (auto& module : part) x = module.forward<torch::Tensor>(x);
        return x;
      });
    }
  };
  add_pieces("features", register_module("features", make_features()), {0, 3, 6, 8, 10});
  add_piece("pool", {}, [](const torch::Tensor& x) { return torch::adaptive_avg_pool2d(x, {6, 6}).flatten(1); });
  add_pieces("classifier", register_module("classifier", make_classifier(options)), {0, 3, 6});
}

}  // namespace lockstep
