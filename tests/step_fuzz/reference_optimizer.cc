// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/reference_optimizer.h"

#include <torch/torch.h>

#include <cmath>
#include <sstream>

namespace lockstep::fuzz {
namespace {

using Tensors = std::vector<torch::Tensor>;

class OfTorch : public ReferenceOptimizer {
 public:
  OfTorch(const TrainerPlan& plan, const Tensors& parameters)
      : optimizer_(make_torch_optimizer(plan, parameters)), lr_(plan.lr) {}

  void step() override { optimizer_->step(); }
  void set_lr(double lr) override {
    lr_ = lr;
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
  }
  std::function<void(ReferenceOptimizer&)> saved() override {
    return [state = state_of(*optimizer_)](ReferenceOptimizer& other) {
      auto& into = dynamic_cast<OfTorch&>(other);
      load_state(*into.optimizer_, state, into.lr_);
    };
  }

 private:
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  double lr_;
};

// What LAMB and LARS keep of one parameter.
struct Moments {
  torch::Tensor first, second;
  int steps = 0;
};

class Layerwise : public ReferenceOptimizer {
 public:
  Layerwise(const TrainerPlan& plan, const Tensors& parameters)
      : rule_(plan.rule), lr_(plan.lr), weight_decay_(plan.weight_decay), parameters_(parameters) {
    for (const torch::Tensor& p : parameters) all_.push_back({torch::zeros_like(p), torch::zeros_like(p)});
  }

  void step() override {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].grad().defined()) continue;
      ++all_[i].steps;
      (rule_ == Rule::kLAMB) ? lamb(parameters_[i], all_[i]) : lars(parameters_[i], all_[i]);
    }
  }
  void set_lr(double lr) override { lr_ = lr; }
  std::function<void(ReferenceOptimizer&)> saved() override {
    return
        [state = copy_of(all_)](ReferenceOptimizer& other) { dynamic_cast<Layerwise&>(other).all_ = copy_of(state); };
  }

 private:
  static std::vector<Moments> copy_of(const std::vector<Moments>& all) {
    std::vector<Moments> copies;
    for (const auto& [first, second, steps] : all) copies.push_back({first.clone(), second.clone(), steps});
    return copies;
  }
  static double norm(const torch::Tensor& tensor) { return tensor.norm().item<double>(); }

  // You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2.
  void lamb(torch::Tensor p, Moments& of) const {
    const torch::Tensor g = p.grad();
    of.first = of.first * 0.9 + g * 0.1;
    of.second = of.second * 0.999 + g * g * 0.001;
    const torch::Tensor m = of.first / (1 - std::pow(0.9, of.steps));
    const torch::Tensor v = of.second / (1 - std::pow(0.999, of.steps));
    const torch::Tensor direction = m / (v.sqrt() + kAdamEps) + weight_decay_ * p;
    const double size = norm(p), length = norm(direction);
    p.sub_(direction, lr_ * (size > 0 && length > 0 ? size / length : 1));
  }

  // You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017), algorithm 1.
  void lars(torch::Tensor p, Moments& of) const {
    const torch::Tensor g = p.grad();
    const double size = norm(p), length = norm(g);
    const double ratio = size > 0 && length > 0 ? kLarsTrust * size / (length + weight_decay_ * size) : 1;
    of.first = of.first * 0.9 + lr_ * ratio * (g + weight_decay_ * p);
    p.sub_(of.first);
  }

  Rule rule_;
  double lr_, weight_decay_;
  Tensors parameters_;
  std::vector<Moments> all_;
};

}  // namespace

std::unique_ptr<ReferenceOptimizer> make_reference_optimizer(const TrainerPlan& plan, const Tensors& parameters) {
  if (is_layerwise(plan)) return std::make_unique<Layerwise>(plan, parameters);
  return std::make_unique<OfTorch>(plan, parameters);
}

std::shared_ptr<torch::optim::Optimizer> make_torch_optimizer(const TrainerPlan& plan, const Tensors& parameters) {
  namespace of = torch::optim;
  if (plan.rule == Rule::kAdam)
    return std::make_shared<of::Adam>(parameters,
                                      of::AdamOptions(plan.lr).eps(kAdamEps).weight_decay(plan.weight_decay));
  if (plan.rule == Rule::kAdamW)
    return std::make_shared<of::AdamW>(parameters,
                                       of::AdamWOptions(plan.lr).eps(kAdamEps).weight_decay(plan.weight_decay));
  const double momentum = plan.rule == Rule::kSGD ? 0 : 0.9;
  return std::make_shared<of::SGD>(parameters, of::SGDOptions(plan.lr)
                                                   .momentum(momentum)
                                                   .nesterov(plan.rule == Rule::kNesterov)
                                                   .weight_decay(plan.weight_decay));
}

std::string state_of(const torch::optim::Optimizer& optimizer) {
  std::ostringstream out;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(out);
  return out.str();
}

void load_state(torch::optim::Optimizer& optimizer, const std::string& state, double lr) {
  std::istringstream in(state);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  optimizer.state().clear();
  optimizer.load(archive);
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

void load_other_state(torch::optim::Optimizer& optimizer) {
  const torch::NoGradGuard no_grad;
  for (auto& [parameter, state] : optimizer.state()) {
    if (auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(state.get())) sgd->momentum_buffer().mul_(3);
    if (auto* const adam = dynamic_cast<torch::optim::AdamParamState*>(state.get())) adam->exp_avg().mul_(3);
    if (auto* const adamw = dynamic_cast<torch::optim::AdamWParamState*>(state.get())) adamw->exp_avg().mul_(3);
  }
}

}  // namespace lockstep::fuzz
