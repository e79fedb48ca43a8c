// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/rank.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <optional>
#include <sstream>

#include "lockstep/ddp.h"
#include "lockstep/gradient_scaler.h"
#include "lockstep/optimizers.h"
#include "lockstep/sync_batch_norm.h"
#include "lockstep/world.h"
#include "tests/step_fuzz/network.h"
#include "tests/step_fuzz/reference.h"
#include "tests/step_fuzz/reference_optimizer.h"

namespace lockstep::fuzz {
namespace {

// How far a value may be from the reference: small + small * |value|, and ten times as far as rounding puts one rank of plain
// libtorch. Gradients and parameters have 8 bits in bfloat16, 11 in float16.
double tolerance(const TrainerPlan& plan) {
  if (plan.hook == Hook::kBFloat16) return 0.1;
  if (plan.hook == Hook::kFloat16 && plan.dtype != torch::kBFloat16) return 0.02;
  if (plan.dtype == torch::kFloat64) return 1e-9;
  return plan.dtype == torch::kFloat32 ? 2e-4 : 0.1;
}

std::string difference(const std::string& name, const torch::Tensor& value, const torch::Tensor& expected,
                       const TrainerPlan& plan, double rounding) {
  const torch::Tensor given = value.to(torch::kFloat64), right = expected.to(torch::kFloat64);
  const double limit = tolerance(plan), largest = right.abs().max().item<double>();
  if (torch::allclose(given, right, limit, limit + 10 * rounding * largest)) return {};
  std::ostringstream text;
  text << name << " is off by " << (given - right).abs().max().item<double>() << " where the largest is " << largest
       << " and rounding " << rounding * largest << ":\n"
       << given.flatten().slice(0, 0, 6) << "\nnot\n"
       << right.flatten().slice(0, 0, 6) << '\n';
  return text.str();
}

// As Python's loss.backward(): what lockstep does begins in a hook and ends in a callback of autograd's.
class BeginInHook : public torch::autograd::FunctionPreHook {
 public:
  BeginInHook(DistributedDataParallel& ddp, const BatchWeight& weight) : ddp_(ddp), weight_(weight) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const double factor = ddp_.begin_backward(weight_);
    torch::autograd::Engine::get_default_engine().queue_callback([&ddp = ddp_] { ddp.end_backward(); });
    return {gradients.front() * factor};
  }

 private:
  DistributedDataParallel& ddp_;
  BatchWeight weight_;
};

// One rank's objects of one trainer.
class Trainer {
 public:
  Trainer(const TrainerPlan& plan, int number, const World& all)
      : plan_(plan), rank_(all.rank()), network_(std::make_unique<Network>(plan, number, /*sparse=*/true)) {
    const bool split = std::any_of(plan.color.begin(), plan.color.begin() + all.size(),
                                   [&](int color) { return color != plan.color[0]; });
    world_ = split ? all.split(color()) : all;
    add_norm();
    network_->freeze(plan.frozen);
    build();
  }

  ~Trainer() {
    std::array<int, 3> order{0, 1, 2};
    for (int i = 0; i < plan_.destruction[static_cast<size_t>(rank_)]; ++i)
      std::next_permutation(order.begin(), order.end());
    for (const int each : order) {
      if (each == 0) network_.reset();
      if (each == 1) optimizer_.reset();
      if (each == 2) ddp_.reset();
    }
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  void run(const Operation& operation) {
    if (!possible(operation)) return;
    switch (operation.action) {
      case Action::kBackward: return backward(operation);
      case Action::kNoSyncBackward: {
        const auto no_sync = ddp_->no_sync();
        return backward(operation);
      }
      case Action::kPlainBackward: return scaled(loss_of(operation, 0), operation).backward();
      case Action::kFailingForward: return failing_forward();
      case Action::kFailingBackward: return failing_backward(operation);
      case Action::kOldGraph: return backward_of_old_graph(operation);
      case Action::kStep: return step();
      case Action::kZeroGrad: return optimizer_->zero_grad();
      case Action::kZeroGradToZeros: return optimizer_->zero_grad(false);
      case Action::kSetLr: return set_learning_rate(*optimizer_, operation.value);
      case Action::kSetLastLr: return optimizer_->param_groups().back().options().set_lr(operation.value);
      case Action::kLoadState: return load_other_state(*optimizer_);
      case Action::kSetClipping: clipping_.max_norm = operation.value; return own_->set_clipping(clipping_);
      case Action::kSetValueClipping: clipping_.max_value = operation.value; return own_->set_clipping(clipping_);
      case Action::kMeanGradients: return ddp_->mean_gradients();
      case Action::kClipNormByHand: return void(torch::nn::utils::clip_grad_norm_(network_->weights, operation.value));
      case Action::kClipValueByHand: return torch::nn::utils::clip_grad_value_(network_->weights, operation.value);
      case Action::kFreeze: return network_->freeze(frozen_by(operation));
      case Action::kUnfreeze: return void(weight(operation).requires_grad_(true));
      case Action::kKeepAverage: return own_->keep_average(0.5);
      case Action::kLoadParameters: return load(operation);
      case Action::kSave: return save();
      case Action::kResume: return resume();
      case Action::kWriteParameter: return write(weight(operation));
      case Action::kWriteData: return write(weight(operation).data());
      case Action::kJoin: return ddp_->join(*optimizer_);
      case Action::kRebuild: return build();
      case Action::kCount: return;
    }
  }

  int color() const { return plan_.color[static_cast<size_t>(rank_)]; }

  // What differs from the reference.
  std::string difference_from(const Expected& expected) const {
    if (expected.undecided) return {};
    std::string text;
    for (size_t i = 0; i < network_->weights.size(); ++i) {
      const torch::Tensor& parameter = network_->weights[i];
      const std::string name = "parameter " + std::to_string(i);
      text += difference(name, parameter, expected.weights[i], plan_, expected.rounding);
      if (plan_.average > 0 && expected.averages[i].defined())
        text += difference("the average of " + name, own_->state_of(parameter).at("ema"), expected.averages[i], plan_,
                           expected.rounding);
    }
    for (size_t i = 0; i < network_->stats.size(); ++i)
      text +=
          difference("buffer " + std::to_string(i), network_->stats[i], expected.stats[i], plan_, expected.rounding);
    return text + difference_of_totals(expected);
  }

 private:
  // What comes after an illegal operation is not judged.
  bool possible(const Operation& operation) const {
    const bool of_own = operation.action == Action::kSetClipping || operation.action == Action::kSetValueClipping ||
                        operation.action == Action::kKeepAverage;
    if (plan_.words && operation.action == Action::kClipValueByHand)
      return false;  // torch has no clamp_() of sparse ones
    return (own_ != nullptr || !of_own) && static_cast<size_t>(operation.parameter) < network_->weights.size();
  }

  void add_norm() {
    const int64_t width = Network::width_of(plan_);
    if (plan_.norm == Norm::kOfRank)
      network_->add_norm(torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(width).eps(kNormEps)), plan_);
    if (plan_.norm == Norm::kSynchronised)
      network_->add_norm(SyncBatchNorm(*world_, SyncBatchNormOptions{.features = width, .eps = kNormEps}), plan_);
  }

  void build() {
    ddp_.reset();
    optimizer_ = make();
    own_ = dynamic_cast<Optimizer*>(optimizer_.get());
    clipping_ = {};
    scaler_ = GradientScaler({.initial_scale = 1024, .growth_interval = 3});
    if (plan_.average > 0) own_->keep_average(plan_.average);
    ddp_ = plan_.untold ? std::make_unique<DistributedDataParallel>(*world_, *network_, options())
                        : std::make_unique<DistributedDataParallel>(*world_, *network_, *optimizer_, options());
  }

  DistributedDataParallelOptions options() const {
    DistributedDataParallelOptions options{
        .share_parameters = shares_parameters(plan_),
        .mean_in_grad = plan_.layout == Layout::kSharedThroughBuckets && plan_.mean_in_grad,
        .gradient_as_bucket_view = plan_.bucket_view,
        .virtual_shards = plan_.shards * world_->size()};
    if (plan_.small_buckets) options.bucket_bytes = kSmallBucket;
    if (plan_.words) options.sparse_parameters = {"words"};
    options.hook = hook();
    return options;
  }

  std::shared_ptr<CommunicationHook> hook() const {
    switch (plan_.hook) {
      case Hook::kNone: return nullptr;
      case Hook::kTopKOfAll: return top_k_hook(1);
      case Hook::kFloat16: return sixteen_bit_hook(torch::kFloat16);
      case Hook::kBFloat16: return sixteen_bit_hook(torch::kBFloat16);
      case Hook::kTopK: return top_k_hook(kTopKShare);
      case Hook::kTwoBit: return two_bit_hook(kTwoBitThreshold);
      case Hook::kPowerSGD: return power_sgd_hook({.rank = 1});
    }
    return nullptr;
  }

  // With groups by the dozen the first has the first parameter, each of the last ones another one, and those between none.
  std::shared_ptr<torch::optim::Optimizer> make() const {
    const auto& weights = network_->weights;
    if (plan_.layout == Layout::kTorch) return make_torch_optimizer(plan_, weights);
    if (plan_.groups == 1) return make(weights);
    const auto optimizer = make({weights[0]});
    for (int group = 1; group < plan_.groups; ++group) {
      const ptrdiff_t left = plan_.groups - group;
      std::vector<torch::Tensor> parameters;
      if (left < std::ssize(weights)) parameters.push_back(*(weights.end() - left));
      optimizer->add_param_group({parameters, optimizer->param_groups()[0].options().clone()});
    }
    return optimizer;
  }

  std::shared_ptr<torch::optim::Optimizer> make(const std::vector<torch::Tensor>& weights) const {
    const double lr = plan_.lr, decay = plan_.weight_decay;
    switch (plan_.rule) {
      case Rule::kSGD: return std::make_shared<SGD>(weights, SGDOptions{.lr = lr, .weight_decay = decay});
      case Rule::kMomentum:
      case Rule::kNesterov:
        return std::make_shared<SGD>(
            weights,
            SGDOptions{.lr = lr, .momentum = 0.9, .nesterov = plan_.rule == Rule::kNesterov, .weight_decay = decay});
      case Rule::kAdam:
        return std::make_shared<Adam>(weights, AdamOptions{.lr = lr, .eps = kAdamEps, .weight_decay = decay});
      case Rule::kAdamW:
        return std::make_shared<AdamW>(weights, AdamWOptions{.lr = lr, .eps = kAdamEps, .weight_decay = decay});
      case Rule::kLAMB:
        return std::make_shared<LAMB>(weights, LAMBOptions{.lr = lr, .eps = kAdamEps, .weight_decay = decay});
      case Rule::kLARS:
        return std::make_shared<LARS>(
            weights, LARSOptions{.lr = lr, .momentum = 0.9, .weight_decay = decay, .trust = kLarsTrust});
    }
    return nullptr;
  }

  void backward(const Operation& operation) {
    int samples = 0;
    for (int shard = 0; shard < std::max(plan_.shards, 1); ++shard) {
      samples = samples_of_shard(operation, rank_, shard);
      const torch::Tensor loss = samples == 0 ? torch::Tensor() : scaled(loss_of(operation, shard), operation);
      backward(loss, samples, operation.halves);
    }
    if (operation.action == Action::kBackward) totals_[operation.id] = ddp_->last_batch();
  }

  void backward(const torch::Tensor& loss, int samples, bool halves) {
    const BatchWeight::Kind alike = samples > 0 ? BatchWeight::kAlike : BatchWeight::kNone;
    halves || plan_.alike ? backward_in_halves(loss, plan_.alike ? BatchWeight(alike, samples) : BatchWeight(samples))
                          : ddp_->backward(loss, samples);
  }

  void backward_in_halves(const torch::Tensor& loss, const BatchWeight& weight) {
    if (weight.samples == 0) {
      ddp_->begin_backward(weight);
      return ddp_->end_backward();
    }
    loss.grad_fn()->add_pre_hook(std::make_unique<BeginInHook>(*ddp_, weight));
    try {
      loss.backward();
    } catch (const std::exception& error) {
      ddp_->cancel_backward(error.what());
      throw;
    }
  }

  torch::Tensor loss_of(const Operation& operation, int shard, bool break_backward = false) {
    Part part = part_of(operation, rank_, shard, samples_of_shard(operation, rank_, shard), plan_, plan_.dtype);
    part.break_backward = break_backward;
    return network_->losses({part})[0];
  }

  torch::Tensor scaled(const torch::Tensor& loss, const Operation& operation) const {
    const torch::Tensor all = plan_.scaled ? scaler_.scale(loss) : loss;
    return has(operation.overflow, rank_) ? all * INFINITY : all;
  }

  // A batch that can't be read, for instance.
  static void failing_forward() {
    try {
      throw std::runtime_error("thrown by the program in forward()");
    } catch (const std::runtime_error&) {
    }
  }

  void failing_backward(const Operation& operation) {
    Operation with_samples = operation;
    with_samples.samples.fill(2);
    const torch::Tensor loss = loss_of(with_samples, 0, /*break_backward=*/true);
    try {
      if (operation.value > 0) {
        const auto no_sync = ddp_->no_sync();
        return backward(loss, 2, /*halves=*/false);
      }
      backward(loss, 2, /*halves=*/false);
    } catch (const std::exception& error) {
      if (std::string(error.what()).find("thrown by the program") == std::string::npos) throw;
    }
  }

  void backward_of_old_graph(Operation operation) {
    operation.samples.fill(2);
    const torch::Tensor old = loss_of(operation, 0);
    backward(loss_of(operation, 0), 2, /*halves=*/false);
    step();
    optimizer_->zero_grad();
    backward(old, 2, /*halves=*/false);
  }

  void step() {
    if (plan_.scaled)
      scaler_.step(*own_);
    else
      optimizer_->step();
  }

  void load(const Operation& operation) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < network_->weights.size(); ++i)
      network_->weights[i].copy_(loaded_weight(operation, i, plan_, network_->weights[i].sizes()));
    ddp_->parameters_written();
  }

  // A checkpoint, as a program would keep it in a file.
  void save() {
    weights_ = copies(network_->weights);
    stats_ = copies(network_->stats);
    states_.clear();
    if (own_ == nullptr) torch_state_ = state_of(*optimizer_);
    for (const torch::Tensor& weight : network_->weights) {
      auto& state = states_.emplace_back();
      if (own_ == nullptr) continue;
      for (const auto& [name, tensor] : own_->state_of(weight)) state[name] = tensor.clone();
    }
    if (shares_parameters(plan_)) world_->barrier();  // before another rank writes what this one reads
  }

  // Where nothing was saved, as after what is illegal, nothing is written.
  void resume() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < weights_.size(); ++i) {
      network_->weights[i].copy_(weights_[i]);
      if (own_ != nullptr) own_->set_state(network_->weights[i], states_[i]);
    }
    for (size_t i = 0; i < stats_.size(); ++i) network_->stats[i].copy_(stats_[i]);
    if (!torch_state_.empty()) load_state(*optimizer_, torch_state_, optimizer_->param_groups()[0].options().get_lr());
    ddp_->parameters_written();
  }

  static std::vector<torch::Tensor> copies(const std::vector<torch::Tensor>& tensors) {
    std::vector<torch::Tensor> all;
    for (const torch::Tensor& tensor : tensors) all.push_back(tensor.detach().clone());
    return all;
  }

  static void write(const torch::Tensor& parameter) {
    const torch::NoGradGuard no_grad;
    parameter.mul_(0.5);
  }

  torch::Tensor& weight(const Operation& operation) {
    return network_->weights[static_cast<size_t>(operation.parameter)];
  }

  std::string difference_of_totals(const Expected& expected) const {
    std::string text;
    for (const auto& [id, mine] : totals_) {
      const auto found = expected.totals.find({rank_, id});
      if (found == expected.totals.end()) continue;  // it exchanges several batches
      const Totals& right = found->second;
      const auto samples = mine.samples;
      const double loss = mine.mean_loss;
      const bool close = std::abs(loss - right.mean_loss) <= tolerance(plan_) * (1 + right.mean_loss);
      const bool same = plan_.scaled || (std::isnan(right.mean_loss) ? std::isnan(loss) : close);
      if (samples != right.samples || !same)
        text += "the totals of backward() " + std::to_string(id) + " are " + std::to_string(samples) +
                " samples, loss " + std::to_string(loss) + ", not " + std::to_string(right.samples) + ", " +
                std::to_string(right.mean_loss) + "\n";
    }
    return text;
  }

  const TrainerPlan& plan_;
  int rank_;
  std::optional<World> world_;
  std::unique_ptr<Network> network_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  Optimizer* own_ = nullptr;  // the same, if it is lockstep's
  std::unique_ptr<DistributedDataParallel> ddp_;
  GradientScaler scaler_;
  ClippingOptions clipping_;
  std::map<int, BatchTotals> totals_;

  // Of the last save().
  std::vector<torch::Tensor> weights_, stats_;
  std::vector<Optimizer::StateTensors> states_;
  std::string torch_state_;
};

}  // namespace

std::string run_rank(const Program& program, const AllExpected& expected, World& world) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (size_t i = 0; i < program.trainers.size(); ++i)
    trainers.push_back(std::make_unique<Trainer>(program.trainers[i], static_cast<int>(i), world));
  for (const Operation& operation : program.operations)
    if (has(operation.ranks, world.rank())) trainers[static_cast<size_t>(operation.trainer)]->run(operation);
  world.barrier();
  std::string differences;
  for (size_t i = 0; i < trainers.size() && !expected.empty(); ++i)
    differences += trainers[i]->difference_from(expected[i].at(trainers[i]->color()));
  world.barrier();
  return differences;
}

AllExpected expected_of(const Program& program) {
  AllExpected all;
  for (size_t i = 0; i < program.trainers.size(); ++i) {
    auto& of_trainer = all.emplace_back();
    for (int rank = 0; rank < program.ranks; ++rank) {
      const int color = program.trainers[i].color[static_cast<size_t>(rank)];
      if (!of_trainer.contains(color)) of_trainer.emplace(color, expected_of(program, i, color));
    }
  }
  return all;
}

}  // namespace lockstep::fuzz
