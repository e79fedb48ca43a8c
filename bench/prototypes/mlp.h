// SPDX-License-Identifier: Apache-2.0
// bench/prototypes/mlp.h: the MLP of the prototypes, and PyTorch's own way to train it.
//
// Threads: torch's
// Ranks:   no communication
#pragma once

#include <ATen/ops/_fused_sgd.h>
#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include "lockstep/deadline.h"

namespace lockstep::prototypes {

using torch::Tensor;

constexpr double kRate = 0.001, kMomentum = 0.9;
constexpr int64_t kBatch = 32;
inline const std::vector<int64_t> kWidths = {1024, 4096, 4096, 1000};

struct Model {
  std::vector<Tensor> weights, biases, weight_momenta, bias_momenta;
};

inline Model make_model() {
  torch::manual_seed(1);
  Model model;
  for (size_t i = 1; i < kWidths.size(); ++i) {
    model.weights.push_back(torch::randn({kWidths[i], kWidths[i - 1]}) * 0.02);
    model.biases.push_back(torch::zeros({kWidths[i]}));
    model.weight_momenta.push_back(torch::zeros_like(model.weights.back()));
    model.bias_momenta.push_back(torch::zeros_like(model.biases.back()));
  }
  return model;
}

inline double bytes_of_weights() {
  double bytes = 0;
  for (size_t i = 1; i < kWidths.size(); ++i) bytes += 4.0 * static_cast<double>(kWidths[i] * kWidths[i - 1]);
  return bytes;
}

struct Samples {
  Tensor data, target;
};

inline Samples make_samples() {
  torch::manual_seed(7);
  return {torch::randn({kBatch, kWidths.front()}), torch::randint(0, kWidths.back(), {kBatch})};
}

// The gradient of the mean cross entropy; `loss` is set to it.
inline Tensor loss_gradient(const Tensor& logits, const Tensor& target, double& loss) {
  const Tensor log = logits.log_softmax(1), which = target.unsqueeze(1);
  loss = -log.gather(1, which).mean().item<double>();
  return log.exp().scatter_add_(1, which, torch::full({kBatch, 1}, -1.F)).div_(kBatch);
}

// p -= rate * (m = momentum * m + g), of one run of memory.
inline void update(float* p, float* m, const float* g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    m[i] = static_cast<float>(kMomentum) * m[i] + g[i];
    p[i] -= static_cast<float>(kRate) * m[i];
  }
}

inline void update(Tensor parameter, Tensor momentum, const Tensor& gradient) {
  update(parameter.data_ptr<float>(), momentum.data_ptr<float>(), gradient.data_ptr<float>(), gradient.numel());
}

// PyTorch's own way: autograd with torch's threads, and the fused SGD.
class OneProcess {
 public:
  OneProcess() : model_(make_model()) {
    for (auto* list : {&model_.weights, &model_.biases})
      for (Tensor& each : *list) each.set_requires_grad(true);
  }

  double step(const Tensor& data, const Tensor& target) {
    Tensor x = data;
    for (size_t i = 0; i < model_.weights.size(); ++i) {
      x = torch::linear(x, model_.weights[i], model_.biases[i]);
      if (i + 1 < model_.weights.size()) x = x.relu();
    }
    const Tensor loss = torch::cross_entropy_loss(x, target);
    loss.backward();
    std::vector<Tensor> parameters, gradients, momenta;
    for (auto [values, buffers] :
         {std::pair(&model_.weights, &model_.weight_momenta), std::pair(&model_.biases, &model_.bias_momenta)})
      for (size_t i = 0; i < values->size(); ++i) {
        parameters.push_back((*values)[i]);
        gradients.push_back((*values)[i].grad());
        momenta.push_back((*buffers)[i]);
      }
    const torch::NoGradGuard no_grad;
    at::_fused_sgd_(parameters, gradients, momenta, 0, kMomentum, kRate, 0, false, false, false);
    for (Tensor& each : parameters) each.mutable_grad() = Tensor();
    return loss.item<double>();
  }
  const Model& model() const { return model_; }

 private:
  Model model_;
};

// The yardsticks of bench/limits.h: bytes or operations per second, at best.
template <class Yardstick>
double best_speed(Yardstick yardstick) {
  double least = 0;
  for (int i = 0; i < 10; ++i) {
    const Stopwatch watch;
    yardstick();
    const double seconds = watch.seconds();
    least = i == 0 ? seconds : std::min(least, seconds);
  }
  return Yardstick::kAmount / least;
}

}  // namespace lockstep::prototypes
