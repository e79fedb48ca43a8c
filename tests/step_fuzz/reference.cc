// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/reference.h"

#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <tuple>

#include "tests/step_fuzz/network.h"
#include "tests/step_fuzz/reference_hook.h"
#include "tests/step_fuzz/reference_optimizer.h"
#include "tests/step_fuzz/rules.h"

namespace lockstep::fuzz {
namespace {

using Tensors = std::vector<torch::Tensor>;

class Reference {
 public:
  Reference(const Program& program, size_t trainer, int color, torch::Dtype dtype)
      : program_(program),
        plan_(program.trainers[trainer]),
        trainer_(static_cast<int>(trainer)),
        dtype_(dtype),
        network_(plan_, trainer_, /*sparse=*/false) {
    for (int rank = 0; rank < program.ranks; ++rank)
      if (plan_.color[static_cast<size_t>(rank)] == color) members_.push_back(rank);
    if (plan_.norm != Norm::kNone)
      network_.add_norm(torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(Network::width_of(plan_)).eps(kNormEps)),
                        plan_);
    network_.freeze(plan_.frozen);
    network_.to(dtype_);
    begin();
  }

  Expected run() {
    for (const Operation& operation : program_.operations)
      if (operation.trainer == trainer_ &&
          std::ranges::any_of(members_, [&](int rank) { return has(operation.ranks, rank); }))
        run(operation);
    note_undecided();
    return {copies(network_.weights), averages_, network_.stats, undecided_, totals_};
  }

 private:
  // What one rank has not exchanged yet.
  struct Pending {
    Tensors gradients;   // of the sum of samples * loss
    double samples = 0;  // loss.backward() counts as one, and so do all of them where ranks count alike
    double first = 0;    // samples of the first batch
    int backwards = 0;
  };

  void begin() {
    lr_ = plan_.lr;
    norm_ = value_ = 0;
    optimizer_ = make_reference_optimizer(plan_, network_.weights);
    averages_.assign(network_.weights.size(), {});
    unit_ = 0;
    std::vector<size_t> exchanged;
    for (size_t i = 0; i < network_.weights.size(); ++i)
      if (network_.weights[i].requires_grad() && !is_sparse(i)) exchanged.push_back(i);
    note_undecided();
    if (keeps_residual(plan_) && members_.size() > 1)
      hook_ = std::make_unique<ReferenceHook>(plan_, network_.weights, exchanged, static_cast<int>(members_.size()));
    drop_pending();
  }

  void note_undecided() { undecided_ = undecided_ || (hook_ && hook_->undecided()); }

  bool is_sparse(size_t parameter) const { return plan_.words && parameter == kWords; }
  bool first_makes(const Operation& operation) const { return has(operation.ranks, members_[0]); }

  void run(const Operation& operation) {
    const bool first = first_makes(operation);
    switch (operation.action) {
      case Action::kBackward:
      case Action::kNoSyncBackward:
      case Action::kPlainBackward: return backward(operation);
      case Action::kStep: return first || joined_ != 0 || shares_parameters(plan_) ? step() : void();
      case Action::kZeroGrad: return zero_grad(true);
      case Action::kZeroGradToZeros: return zero_grad(false);
      case Action::kSetLr: return first ? set_lr(operation.value) : void();
      case Action::kSetClipping: return first ? void(norm_ = operation.value) : void();
      case Action::kSetValueClipping: return first ? void(value_ = operation.value) : void();
      case Action::kMeanGradients: return in_shared_memory(plan_) ? exchange() : void();  // else it is the mean already
      case Action::kClipNormByHand: return clip_by_hand(operation.value, 0);
      case Action::kClipValueByHand: return clip_by_hand(0, operation.value);
      case Action::kFreeze: return freeze(operation, false);
      case Action::kUnfreeze: return freeze(operation, true);
      case Action::kLoadParameters: return load(operation);
      case Action::kSave: return save();
      case Action::kResume: return resume_();
      case Action::kWriteParameter:
      case Action::kWriteData: return halve(operation);
      case Action::kJoin: return join(operation);
      case Action::kRebuild: return begin();
      default: return;
    }
  }

  // ---- backward()

  // Adds samples * loss of every rank to what is pending; loss.backward() counts each rank as one sample.
  void backward(const Operation& operation) {
    const bool plain = operation.action == Action::kPlainBackward;
    if (backwards_ == 0) before_ = take_gradients();
    plan_.norm == Norm::kSynchronised ? add_together(operation, plain) : add_each(operation, plain);
    for (size_t member = 0; member < members_.size(); ++member)
      if (has(operation.ranks, members_[member])) backwards_ = std::max(backwards_, ++pending_[member].backwards);
    if (operation.action == Action::kBackward && backwards_ == 1 && !overflow_) note_totals(operation);
    if (plain || (operation.action == Action::kBackward && !in_shared_memory(plan_))) exchange();
  }

  void note_totals(const Operation& operation) {
    const Totals totals{static_cast<int>(all_samples()), operation.halves || plan_.alike ? NAN : loss_ / all_samples()};
    for (const int rank : members_)
      if (has(operation.ranks, rank)) totals_[{rank, id_of(operation, rank)}] = totals;
  }

  // Buffers are those of rank 0, of its first shard.
  void add_each(const Operation& operation, bool plain) {
    for (size_t member = 0; member < members_.size(); ++member)
      for (int shard = 0; shard < std::max(plan_.shards, 1); ++shard) {
        const int samples = samples_of(operation, member, shard);
        if (samples == 0) continue;
        const Tensors stats = copies(network_.stats);
        const auto losses = network_.losses({part(operation, member, shard)});
        const double weight = plain || plan_.alike ? 1 : samples;
        count(operation, member, weight, losses[0].item<double>());
        (losses[0] * weight).backward();
        take_into(pending_[member].gradients);
        if (member > 0 || shard > 0) set(network_.stats, stats);
      }
  }

  // The batches of all ranks are normalised together, so their gradients are not told apart.
  void add_together(const Operation& operation, bool plain) {
    std::vector<Part> parts;
    for (size_t member = 0; member < members_.size(); ++member) parts.push_back(part(operation, member, 0));
    const auto losses = network_.losses(parts);
    torch::Tensor sum = torch::zeros({}, dtype_);
    for (size_t member = 0; member < members_.size(); ++member) {
      const double weight = plain ? 1 : samples_of(operation, member, 0);
      count(operation, member, weight, losses[member].item<double>());
      sum = sum + losses[member] * weight;
    }
    sum.backward();
    take_into(pending_[0].gradients);
  }

  int samples_of(const Operation& operation, size_t member, int shard) const {
    const int rank = members_[member];
    return has(operation.ranks, rank) ? samples_of_shard(operation, rank, shard) : 0;
  }
  Part part(const Operation& operation, size_t member, int shard) const {
    return part_of(operation, members_[member], shard, samples_of(operation, member, shard), plan_, dtype_);
  }

  void count(const Operation& operation, size_t member, double weight, double loss) {
    Pending& pending = pending_[member];
    if (has(operation.overflow, members_[member])) overflow_ = true;
    pending.samples = plan_.alike ? 1 : pending.samples + weight;
    if (pending.first == 0) pending.first = weight;
    loss_ += weight * loss;
  }

  double all_samples() const {
    double samples = 0;
    for (const Pending& pending : pending_) samples += pending.samples;
    return samples;
  }

  // ---- The exchange

  // T backward() over n samples: T / n times the sum, added to what was in .grad before. Of n ranks that count alike: 1 / n.
  int times() const { return plan_.alike ? 1 : backwards_; }
  void exchange() {
    if (backwards_ == 0) return;
    const double samples = all_samples();
    const Tensors sent = hook_ ? sent_by_hook(samples) : Tensors(network_.weights.size());
    for (size_t i = 0; i < network_.weights.size(); ++i) {
      torch::Tensor& gradient = network_.weights[i].mutable_grad();
      gradient = before_[i];
      if (sent[i].defined()) gradient = sent[i] * (unit_ / samples);
      if (hook_ && !is_sparse(i)) continue;
      for (const Pending& pending : pending_) add(gradient, pending.gradients[i], times() / samples);
    }
    unit_ = power_of_two_below(samples);
    drop_pending();
  }

  // What the hook makes of the ranks' .grad, for parameters that some rank has used. Each rank's .grad holds what was there
  // before, too.
  Tensors sent_by_hook(double samples) {
    if (unit_ == 0) unit_ = power_of_two_below(samples);
    std::vector<Tensors> given(members_.size(), Tensors(before_.size()));
    std::vector<bool> used(before_.size());
    for (size_t member = 0; member < members_.size(); ++member) {
      const Pending& pending = pending_[member];
      for (size_t i = 0; i < before_.size() && pending.samples > 0; ++i) {
        add(given[member][i], before_[i], pending.first * times() / unit_);
        add(given[member][i], pending.gradients[i], times() / unit_);
        if (given[member][i].defined()) used[i] = true;
      }
    }
    Tensors sent = hook_->sum_of(given, unit_);
    for (size_t i = 0; i < sent.size(); ++i)
      if (!used[i]) sent[i] = torch::Tensor();
    return sent;
  }

  static double power_of_two_below(double samples) { return std::exp2(std::floor(std::log2(samples))); }

  static void add(torch::Tensor& to, const torch::Tensor& tensor, double factor) {
    if (tensor.defined()) to = to.defined() ? to + tensor * factor : tensor * factor;
  }

  // ---- step()

  // Where .grad is a rank's own, what was counted counts until zero_grad().
  void step() {
    if (!in_shared_memory(plan_) || plan_.shards > 0 || backwards_ == 0) return step_with_mean();
    const auto counted = std::tuple(backwards_, loss_, before_, pending_);
    step_with_mean();
    take_gradients();
    std::tie(backwards_, loss_, before_, pending_) = counted;
  }

  void step_with_mean() {
    exchange();
    if (!overflow_) update();
    if (plan_.shards == 0) return;
    for (torch::Tensor& weight : network_.weights) weight.mutable_grad() = torch::Tensor();
    overflow_ = false;  // it was in gradients that are gone
  }

  void update() {
    const Tensors gradients = current_gradients();
    Tensors& weights = network_.weights;
    for (torch::Tensor& weight : weights)
      if (weight.grad().defined()) weight.mutable_grad() = weight.grad().clone();
    clip_by_hand(norm_, value_);
    optimizer_->step();
    for (size_t i = 0; i < weights.size(); ++i) {
      if (weights[i].grad().defined()) move_average(averages_[i], weights[i].detach());
      weights[i].mutable_grad() = gradients[i];
    }
  }

  void move_average(torch::Tensor& average, const torch::Tensor& weight) const {
    if (plan_.average == 0) return;
    average = average.defined() ? average * plan_.average + weight * (1 - plan_.average) : weight.clone();
  }

  void zero_grad(bool to_none) {
    if (backwards_ > 0)
      for (size_t i = 0; i < before_.size(); ++i)
        for (const Pending& pending : pending_) {
          torch::Tensor& gradient = network_.weights[i].mutable_grad();
          if (!gradient.defined()) gradient = before_[i].defined() ? before_[i] : pending.gradients[i];
        }
    for (torch::Tensor& weight : network_.weights)
      if (to_none)
        weight.mutable_grad() = torch::Tensor();
      else if (weight.grad().defined())
        weight.mutable_grad() = torch::zeros_like(weight.grad());
    overflow_ = false;
    drop_pending();
  }

  // The last one drops what a step() has left in .grad.
  void join(const Operation& operation) {
    for (const int rank : members_) joined_ |= operation.ranks & 1U << rank;
    if (static_cast<size_t>(std::popcount(joined_)) < members_.size()) return;
    joined_ = 0;
    zero_grad(true);
  }

  void clip_by_hand(double norm, double value) {
    if (norm > 0) torch::nn::utils::clip_grad_norm_(network_.weights, norm);
    if (value > 0) torch::nn::utils::clip_grad_value_(network_.weights, value);
  }

  void set_lr(double lr) {
    lr_ = lr;
    optimizer_->set_lr(lr);
  }

  // ---- What is written by hand

  void freeze(const Operation& operation, bool requires_grad) {
    if (!first_makes(operation)) return;
    if (!requires_grad) return network_.freeze(frozen_by(operation));
    network_.weights[static_cast<size_t>(operation.parameter)].requires_grad_(true);
  }

  void load(const Operation& operation) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < network_.weights.size(); ++i)
      network_.weights[i].copy_(loaded_weight(operation, i, plan_, network_.weights[i].sizes()));
  }

  void halve(const Operation& operation) {
    const torch::NoGradGuard no_grad;
    network_.weights[static_cast<size_t>(operation.parameter)].mul_(0.5);
  }

  void save() {
    resume_ = [this, weights = copies(network_.weights), stats = copies(network_.stats), averages = copies(averages_),
               state = optimizer_->saved()] {
      set(network_.weights, weights);
      set(network_.stats, stats);
      averages_ = copies(averages);
      state(*optimizer_);
    };
  }

  // ---- Tensors

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
  void take_into(Tensors& sums) {
    const Tensors more = take_gradients();
    for (size_t i = 0; i < more.size(); ++i) add(sums[i], more[i], 1);
  }
  static Tensors copies(const Tensors& tensors) {
    Tensors all;
    for (const torch::Tensor& tensor : tensors) all.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
    return all;
  }
  static void set(const Tensors& tensors, const Tensors& values) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < tensors.size(); ++i) torch::Tensor(tensors[i]).copy_(values[i]);
  }
  void drop_pending() {
    backwards_ = 0;
    loss_ = 0;
    before_.assign(network_.weights.size(), {});
    pending_.assign(members_.size(), {.gradients = Tensors(network_.weights.size())});
  }

  const Program& program_;
  const TrainerPlan& plan_;
  int trainer_;
  torch::Dtype dtype_;
  std::vector<int> members_;  // the ranks of this world
  Network network_;
  std::unique_ptr<ReferenceOptimizer> optimizer_;
  std::unique_ptr<ReferenceHook> hook_;  // if there is one that keeps a residual
  double unit_ = 0;                      // what a hook's gradients are divided by: a power of two
  double lr_ = 0, norm_ = 0, value_ = 0;
  int backwards_ = 0;  // T, of what was not exchanged yet
  double loss_ = 0;    // of these, weighted
  std::vector<Pending> pending_;
  Tensors before_;  // .grad before the first of these
  bool overflow_ = false;
  Tensors averages_;
  std::function<void()> resume_ = [] {};
  std::map<std::pair<int, int>, Totals> totals_;
  Ranks joined_ = 0;
  bool undecided_ = false;
};

double largest(const torch::Tensor& tensor) { return tensor.numel() == 0 ? 0 : tensor.abs().max().item<double>(); }

// The largest distance, divided by the tensor's largest value.
double distance(const Tensors& given, const Tensors& right) {
  double most = 0;
  for (size_t i = 0; i < right.size(); ++i)
    if (right[i].defined() && right[i].is_floating_point() && largest(right[i]) > 0)
      most = std::max(most, largest(given[i] - right[i]) / largest(right[i]));
  return most;
}

}  // namespace

// A program may magnify rounding, for instance if it diverges: so it also runs in float32, on one rank.
Expected expected_of(const Program& program, size_t trainer, int color) {
  const Program executed = as_executed(program, trainer, color);
  const TrainerPlan& plan = program.trainers[trainer];
  Expected expected = Reference(executed, trainer, color, torch::kFloat64).run();
  if (plan.dtype != torch::kFloat32 || keeps_residual(plan)) return expected;
  const Expected rounded = Reference(executed, trainer, color, torch::kFloat32).run();
  expected.rounding =
      std::max({distance(rounded.weights, expected.weights), distance(rounded.averages, expected.averages),
                distance(rounded.stats, expected.stats)});
  return expected;
}

}  // namespace lockstep::fuzz
