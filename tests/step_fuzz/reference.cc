// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/reference.h"

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "tests/step_fuzz/network.h"

namespace lockstep::fuzz {
namespace {

using Tensors = std::vector<torch::Tensor>;

class Reference {
 public:
  Reference(const Program& program, std::size_t trainer, int color)
      : program_(program),
        plan_(program.trainers[trainer]),
        trainer_(static_cast<int>(trainer)),
        network_(plan_, trainer_) {
    for (int rank = program.ranks - 1; rank >= 0; --rank)
      if (plan_.color[static_cast<std::size_t>(rank)] == color) {
        members_ |= 1U << rank;
        first_ = rank;
      }
    network_.to(torch::kFloat64);
    begin();
  }

  Expected run() {
    for (const Operation& operation : program_.operations)
      if (operation.trainer == trainer_ && (operation.ranks & members_) != 0) run(operation);
    return {copies(network_.weights), averages_, network_.seen, totals_};
  }

 private:
  void begin() {
    lr_ = plan_.lr;
    norm_ = value_ = 0;
    optimizer_ = make_optimizer();
    averages_.assign(kParameters, {});
    drop_pending();
  }

  std::unique_ptr<torch::optim::Optimizer> make_optimizer() const {
    using namespace torch::optim;
    const double momentum = plan_.rule == Rule::kSGD ? 0 : 0.9;
    if (plan_.rule == Rule::kAdam)
      return std::make_unique<Adam>(network_.weights, AdamOptions(lr_).eps(1e-3).weight_decay(plan_.weight_decay));
    if (plan_.rule == Rule::kAdamW)
      return std::make_unique<AdamW>(network_.weights, AdamWOptions(lr_).eps(1e-3).weight_decay(plan_.weight_decay));
    return std::make_unique<SGD>(
        network_.weights,
        SGDOptions(lr_).momentum(momentum).nesterov(plan_.rule == Rule::kNesterov).weight_decay(plan_.weight_decay));
  }

  void run(const Operation& operation) {
    const bool first = has(operation.ranks, first_);
    switch (operation.action) {
      case Action::kBackward:
      case Action::kNoSyncBackward:
      case Action::kPlainBackward: return backward(operation);
      case Action::kStep: return step();
      case Action::kZeroGrad: return zero_grad(true);
      case Action::kZeroGradToZeros: return zero_grad(false);
      case Action::kSetLr: return first ? set_lr(operation.value) : void();
      case Action::kSetClipping: return first ? void(norm_ = operation.value) : void();
      case Action::kSetValueClipping: return first ? void(value_ = operation.value) : void();
      case Action::kClipNormByHand: return clip_by_hand(operation.value, 0);
      case Action::kClipValueByHand: return clip_by_hand(0, operation.value);
      case Action::kFreeze: return freeze(operation, false);
      case Action::kUnfreeze: return freeze(operation, true);
      case Action::kLoadParameters: return load(operation);
      case Action::kWriteParameter:
      case Action::kWriteData: return halve(operation);
      case Action::kRebuild: return begin();
      default: return;
    }
  }

  // Adds sum_j m_j loss_j to what is pending, over the samples m_j of every rank; loss.backward() counts each rank as one.
  void backward(const Operation& operation) {
    const bool plain = operation.action == Action::kPlainBackward;
    if (backwards_ == 0) before_ = take_gradients();
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (has(operation.ranks & members_, rank)) add_losses(operation, rank, plain);
    ++backwards_;
    if (operation.action == Action::kBackward && backwards_ == 1 && !overflow_)
      totals_[operation.id] = {static_cast<int>(samples_), loss_ / samples_};
    if (plain || (operation.action == Action::kBackward && !in_shared_memory(plan_))) exchange();
  }

  void add_losses(const Operation& operation, int rank, bool plain) {
    for (int shard = 0; shard < std::max(plan_.shards, 1); ++shard) {
      const int samples = samples_of_shard(operation, rank, shard);
      if (samples == 0) continue;
      const Batch batch = batch_of(operation, rank, shard, samples, plan_.dtype, torch::kFloat64);
      const torch::Tensor seen = plan_.buffers ? network_.seen.clone() : torch::Tensor();
      const torch::Tensor loss =
          network_.loss(batch.data, batch.target, operation.unused[static_cast<std::size_t>(rank)], false);
      if (plan_.buffers && (rank != first_ || shard > 0)) network_.seen.copy_(seen);  // buffers are those of rank 0
      if (has(operation.overflow, rank)) overflow_ = true;
      const double weight = plain ? 1 : samples;
      (loss * weight).backward();
      samples_ += weight;
      loss_ += weight * loss.item<double>();
    }
  }

  // T backward() over n samples: T / n times the sum, added to what was in .grad before.
  void exchange() {
    if (backwards_ == 0) return;
    Tensors pending = take_gradients();
    const double factor = backwards_ / samples_;
    for (std::size_t i = 0; i < pending.size(); ++i) {
      torch::Tensor& gradient = network_.weights[i].mutable_grad();
      gradient = before_[i];
      if (pending[i].defined()) gradient = gradient.defined() ? gradient + pending[i] * factor : pending[i] * factor;
    }
    drop_pending();
  }

  // Where .grad is a rank's own, what was counted counts until zero_grad().
  void step() {
    if (!in_shared_memory(plan_) || plan_.shards > 0 || backwards_ == 0) return step_with_mean();
    const Tensors own = current_gradients(), before = before_;
    const auto counts = std::tuple(backwards_, samples_, loss_);
    step_with_mean();
    for (std::size_t i = 0; i < own.size(); ++i) network_.weights[i].mutable_grad() = own[i];
    before_ = before;
    std::tie(backwards_, samples_, loss_) = counts;
  }

  void step_with_mean() {
    exchange();
    if (overflow_) return;
    const Tensors gradients = current_gradients();
    Tensors& weights = network_.weights;
    for (torch::Tensor& weight : weights)
      if (weight.grad().defined()) weight.mutable_grad() = weight.grad().clone();
    clip_by_hand(norm_, value_);
    optimizer_->step();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (weights[i].grad().defined()) move_average(averages_[i], weights[i].detach());
      weights[i].mutable_grad() = plan_.shards > 0 ? torch::Tensor() : gradients[i];
    }
  }

  void move_average(torch::Tensor& average, const torch::Tensor& weight) const {
    if (plan_.average == 0) return;
    average = average.defined() ? average * plan_.average + weight * (1 - plan_.average) : weight.clone();
  }

  void zero_grad(bool to_none) {
    if (backwards_ > 0)
      for (std::size_t i = 0; i < before_.size(); ++i)
        if (before_[i].defined() && !network_.weights[i].grad().defined())
          network_.weights[i].mutable_grad() = before_[i];
    for (torch::Tensor& weight : network_.weights)
      if (to_none)
        weight.mutable_grad() = torch::Tensor();
      else if (weight.grad().defined())
        weight.mutable_grad() = torch::zeros_like(weight.grad());
    overflow_ = false;
    drop_pending();
  }

  void clip_by_hand(double norm, double value) {
    if (plan_.shards > 0 && norm + value > 0 && !network_.weights[0].grad().defined()) return;
    if (norm > 0) torch::nn::utils::clip_grad_norm_(network_.weights, norm);
    if (value > 0) torch::nn::utils::clip_grad_value_(network_.weights, value);
  }

  void set_lr(double lr) {
    lr_ = lr;
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
  }

  void freeze(const Operation& operation, bool requires_grad) {
    if (has(operation.ranks, first_))
      network_.weights[static_cast<std::size_t>(operation.parameter)].requires_grad_(requires_grad);
  }

  void load(const Operation& operation) {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < network_.weights.size(); ++i)
      network_.weights[i].copy_(loaded_weight(operation, i, plan_, network_.weights[i].sizes()));
  }

  void halve(const Operation& operation) {
    const torch::NoGradGuard no_grad;
    network_.weights[static_cast<std::size_t>(operation.parameter)].mul_(0.5);
  }

  Tensors current_gradients() const {
    Tensors gradients;
    for (const torch::Tensor& weight : network_.weights) gradients.push_back(weight.grad());
    return gradients;
  }
  Tensors take_gradients() {
    Tensors gradients = current_gradients();
    for (torch::Tensor& weight : network_.weights) weight.mutable_grad() = torch::Tensor();
    return gradients;
  }
  static Tensors copies(const Tensors& tensors) {
    Tensors all;
    for (const torch::Tensor& tensor : tensors) all.push_back(tensor.detach().clone());
    return all;
  }
  void drop_pending() {
    backwards_ = 0;
    samples_ = loss_ = 0;
    before_.assign(kParameters, {});
  }

  const Program& program_;
  const TrainerPlan& plan_;
  int trainer_;
  Ranks members_ = 0;
  int first_ = 0;
  Network network_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  double lr_ = 0, norm_ = 0, value_ = 0;
  int backwards_ = 0;  // T, of what was not exchanged yet
  double samples_ = 0, loss_ = 0;
  Tensors before_;  // .grad before the first of these
  bool overflow_ = false;
  Tensors averages_;
  std::map<int, Totals> totals_;
};

}  // namespace

Expected expected_of(const Program& program, std::size_t trainer, int color) {
  return Reference(program, trainer, color).run();
}

}  // namespace lockstep::fuzz
