// SPDX-License-Identifier: Apache-2.0
// lockstep's optimizers against PyTorch's, and timm's for LAMB and LARS, recorded by make_optimizer_reference.py.
#include <functional>

#include "lockstep/checkpoint.h"
#include "lockstep/optimizers.h"
#include "tests/reference/ramp.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::ramp;
using Tensors = std::vector<torch::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(const Tensors&)>;

constexpr int kRecordedSteps = 10;

Tensors make_parameters() {
  const std::vector<std::vector<int64_t>> shapes = {{5, 3}, {7}, {4, 3, 3, 3}};
  Tensors parameters;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const int64_t count = c10::multiply_integers(shapes[i]);
    parameters.push_back((ramp(count, static_cast<int64_t>(i)) * 2).reshape(shapes[i]).set_requires_grad(true));
  }
  return parameters;
}

std::unique_ptr<Optimizer> train(const Tensors& parameters, const MakeOptimizer& make) {
  auto optimizer = make(parameters);
  for (int step = 0; step < kRecordedSteps; ++step) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const torch::Tensor& p = parameters[i];
      p.mutable_grad() = ramp(p.numel(), 100 + 10 * step + static_cast<int64_t>(i)).reshape(p.sizes());
    }
    optimizer->step();
  }
  return optimizer;
}

void expect_as_recorded(const Tensors& found, const std::string& name) {
  const TensorFile recorded = load_safetensors(OPTIMIZER_REFERENCE);
  for (size_t i = 0; i < found.size(); ++i) {
    const torch::Tensor& expected = recorded.tensors.at(name + "/" + std::to_string(i));
    EXPECT_TRUE(torch::allclose(found[i].detach(), expected, 1e-12, 1e-13)) << name << ", parameter " << i;
  }
}

struct Case {
  const char* name;
  MakeOptimizer make;
};

template <class O, class Options>
MakeOptimizer of(const Options& options, const ClippingOptions& clipping = {}) {
  return [=](const Tensors& parameters) {
    auto optimizer = std::make_unique<O>(parameters, options);
    optimizer->set_clipping(clipping);
    return optimizer;
  };
}

const Case kCases[] = {
    {"sgd", of<SGD>(SGDOptions{.lr = 0.1})},
    {"momentum", of<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01})},
    {"nesterov", of<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01})},
    {"adam", of<Adam>(AdamOptions{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1})},
    {"adamw", of<AdamW>(AdamWOptions{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1})},
    {"lamb", of<LAMB>(LAMBOptions{.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1})},
    {"lars", of<LARS>(LARSOptions{.lr = 0.5, .momentum = 0.9, .weight_decay = 0.01, .trust = 0.02})},
    {"clipped by norm", of<SGD>(SGDOptions{.lr = 0.1}, ClippingOptions{.max_norm = 0.5})},
    {"clipped by value", of<SGD>(SGDOptions{.lr = 0.1}, ClippingOptions{.max_value = 0.2})},
};

TEST(OptimizersAgainstPyTorch, end_with_the_recorded_parameters) {
  for (const Case& one : kCases) {
    const Tensors parameters = make_parameters();
    train(parameters, one.make);
    expect_as_recorded(parameters, one.name);
  }
}

TEST(OptimizersAgainstPyTorch, keep_the_recorded_average) {
  const Tensors parameters = make_parameters();
  const auto optimizer = train(parameters, [](const Tensors& all) {
    auto sgd = std::make_unique<SGD>(all, SGDOptions{.lr = 0.1});
    sgd->keep_average(0.9);
    return sgd;
  });
  Tensors averages;
  for (const torch::Tensor& parameter : parameters) averages.push_back(optimizer->state_of(parameter).at("ema"));
  expect_as_recorded(averages, "average");
}

}  // namespace
}  // namespace lockstep
