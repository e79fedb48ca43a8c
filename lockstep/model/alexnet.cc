// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/pooling.h>

namespace lockstep {
namespace {

namespace nn = torch::nn;

nn::ReLU relu() { return nn::ReLU(nn::ReLUOptions(/*inplace=*/true)); }
nn::MaxPool2d pool() { return nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2)); }

nn::Sequential make_features() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 64, 11).stride(4).padding(2)), relu(), pool(),
                        nn::Conv2d(nn::Conv2dOptions(64, 192, 5).padding(2)), relu(), pool(),
                        nn::Conv2d(nn::Conv2dOptions(192, 384, 3).padding(1)), relu(),
                        nn::Conv2d(nn::Conv2dOptions(384, 256, 3).padding(1)), relu(),
                        nn::Conv2d(nn::Conv2dOptions(256, 256, 3).padding(1)), relu(), pool());
}

nn::Sequential make_classifier(const AlexNetOptions& options) {
  return nn::Sequential(nn::Dropout(options.dropout), nn::Linear(256 * 6 * 6, 4096), relu(),
                        nn::Dropout(options.dropout), nn::Linear(4096, 4096), relu(),
                        nn::Linear(4096, options.classes));
}

}  // namespace

AlexNetImpl::AlexNetImpl(const AlexNetOptions& options) {
  // A piece for the modules from each of `begins` to the next.
  const auto add_pieces = [this](const std::string& name, const auto& modules, std::vector<ptrdiff_t> begins) {
    begins.push_back(std::ssize(*modules));
    for (size_t i = 0; i + 1 < begins.size(); ++i) {
      std::vector<nn::AnyModule> part(modules->begin() + begins[i], modules->begin() + begins[i + 1]);
      std::vector<nn::Module*> pointers;
      for (const auto& module : part) pointers.push_back(module.ptr().get());
      add_piece(name + "." + std::to_string(begins[i]), pointers, [part](Tensor x) mutable {
        for (auto& module : part) x = module.forward<Tensor>(x);
        return x;
      });
    }
  };
  add_pieces("features", register_module("features", make_features()), {0, 3, 6, 8, 10});
  add_piece("pool", {}, [](const Tensor& x) { return torch::adaptive_avg_pool2d(x, {6, 6}).flatten(1); });
  add_pieces("classifier", register_module("classifier", make_classifier(options)), {0, 3, 6});
}

}  // namespace lockstep
