// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/run.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>

#include "lockstep/ddp.h"
#include "lockstep/gradient_scaler.h"
#include "lockstep/optimizers.h"
#include "lockstep/world.h"
#include "tests/step_fuzz/network.h"
#include "tests/step_fuzz/reference.h"

namespace lockstep::fuzz {
namespace {

constexpr std::chrono::seconds kTimeout{8};  // ends some illegal programs

// How far a value may be from the reference: small + small * |value|. 16-bit gradients and parameters have 8 bits.
double tolerance(const TrainerPlan& plan) {
  if (plan.dtype == torch::kFloat64) return 1e-9;
  return plan.dtype == torch::kFloat32 ? 2e-4 : 0.1;
}

std::string difference(const std::string& name, const torch::Tensor& value, const torch::Tensor& expected,
                       const TrainerPlan& plan) {
  const torch::Tensor given = value.to(torch::kFloat64), right = expected.to(torch::kFloat64);
  const double limit = tolerance(plan);
  if (torch::allclose(given, right, limit, limit)) return {};
  std::ostringstream text;
  text << name << " is off by " << (given - right).abs().max().item<double>() << ":\n"
       << given.flatten().slice(0, 0, 6) << "\nnot\n"
       << right.flatten().slice(0, 0, 6) << '\n';
  return text.str();
}

// One rank's objects of one trainer.
class Trainer {
 public:
  Trainer(const TrainerPlan& plan, int number, const World& all)
      : plan_(plan), rank_(all.rank()), network_(std::make_unique<Network>(plan, number)) {
    const bool split = std::any_of(plan.color.begin(), plan.color.begin() + all.size(),
                                   [&](int color) { return color != plan.color[0]; });
    world_ = split ? all.split(color()) : all;
    build();
  }

  ~Trainer() {
    std::array<int, 3> order{0, 1, 2};
    for (int i = 0; i < plan_.destruction[static_cast<std::size_t>(rank_)]; ++i)
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
    switch (operation.action) {
      case Action::kBackward: return backward(operation);
      case Action::kNoSyncBackward: {
        const auto no_sync = ddp_->no_sync();
        return backward(operation);
      }
      case Action::kPlainBackward: return scaled(loss_of(operation, 0), operation).backward();
      case Action::kFailingForward: return failing_forward();
      case Action::kFailingBackward: return failing_backward(operation);
      case Action::kStep: return step();
      case Action::kZeroGrad: return optimizer_->zero_grad();
      case Action::kZeroGradToZeros: return optimizer_->zero_grad(false);
      case Action::kSetLr: return set_learning_rate(*optimizer_, operation.value);
      case Action::kSetClipping: clipping_.max_norm = operation.value; return own_->set_clipping(clipping_);
      case Action::kSetValueClipping: clipping_.max_value = operation.value; return own_->set_clipping(clipping_);
      case Action::kClipNormByHand: return void(torch::nn::utils::clip_grad_norm_(network_->weights, operation.value));
      case Action::kClipValueByHand: return torch::nn::utils::clip_grad_value_(network_->weights, operation.value);
      case Action::kFreeze: return void(weight(operation).requires_grad_(false));
      case Action::kUnfreeze: return void(weight(operation).requires_grad_(true));
      case Action::kKeepAverage: return own_->keep_average(0.5);
      case Action::kLoadParameters: return load(operation);
      case Action::kWriteParameter: return write(weight(operation));
      case Action::kWriteData: return write(weight(operation).data());
      case Action::kJoin: return ddp_->join(*optimizer_);
      case Action::kRebuild: return build();
      case Action::kCount: return;
    }
  }

  int color() const { return plan_.color[static_cast<std::size_t>(rank_)]; }

  // What differs from the reference.
  std::string difference_from(const Expected& expected) const {
    std::string text;
    for (std::size_t i = 0; i < network_->weights.size(); ++i) {
      const torch::Tensor& parameter = network_->weights[i];
      const std::string name = "parameter " + std::to_string(i);
      text += difference(name, parameter, expected.weights[i], plan_);
      if (plan_.average > 0 && expected.averages[i].defined())
        text += difference("the average of " + name, own_->state_of(parameter).at("ema"), expected.averages[i], plan_);
    }
    if (plan_.buffers) text += difference("the buffer", network_->seen, expected.seen, plan_);
    return text + difference_of_totals(expected);
  }

 private:
  void build() {
    ddp_.reset();
    optimizer_ = make();
    own_ = dynamic_cast<Optimizer*>(optimizer_.get());
    clipping_ = {};
    scaler_ = GradientScaler({.initial_scale = 1024, .growth_interval = 3});
    if (plan_.average > 0) own_->keep_average(plan_.average);
    ddp_ = std::make_unique<DistributedDataParallel>(*world_, *network_, *optimizer_, options());
  }

  DistributedDataParallelOptions options() const {
    DistributedDataParallelOptions options{.share_parameters = shares_parameters(plan_),
                                           .mean_in_grad = plan_.layout == Layout::kSharedThroughBuckets,
                                           .gradient_as_bucket_view = plan_.bucket_view,
                                           .virtual_shards = plan_.shards * world_->size()};
    if (plan_.small_buckets) options.bucket_bytes = 32;
    if (plan_.hook == Hook::kTopKOfAll) options.hook = top_k_hook(1);
    return options;
  }

  std::shared_ptr<torch::optim::Optimizer> make() const {
    const auto& weights = network_->weights;
    const double momentum = plan_.rule == Rule::kSGD ? 0 : 0.9, decay = plan_.weight_decay;
    const bool nesterov = plan_.rule == Rule::kNesterov, own = plan_.layout != Layout::kTorch;
    if (plan_.rule == Rule::kAdam && own)
      return std::make_shared<Adam>(weights, AdamOptions{.lr = plan_.lr, .eps = 1e-3, .weight_decay = decay});
    if (plan_.rule == Rule::kAdamW && own)
      return std::make_shared<AdamW>(weights, AdamWOptions{.lr = plan_.lr, .eps = 1e-3, .weight_decay = decay});
    if (own)
      return std::make_shared<SGD>(
          weights, SGDOptions{.lr = plan_.lr, .momentum = momentum, .nesterov = nesterov, .weight_decay = decay});
    if (plan_.rule == Rule::kAdam)
      return std::make_shared<torch::optim::Adam>(weights,
                                                  torch::optim::AdamOptions(plan_.lr).eps(1e-3).weight_decay(decay));
    if (plan_.rule == Rule::kAdamW)
      return std::make_shared<torch::optim::AdamW>(weights,
                                                   torch::optim::AdamWOptions(plan_.lr).eps(1e-3).weight_decay(decay));
    return std::make_shared<torch::optim::SGD>(
        weights, torch::optim::SGDOptions(plan_.lr).momentum(momentum).nesterov(nesterov).weight_decay(decay));
  }

  void backward(const Operation& operation) {
    int samples = 0;
    for (int shard = 0; shard < std::max(plan_.shards, 1); ++shard) {
      samples = samples_of_shard(operation, rank_, shard);
      ddp_->backward(samples == 0 ? torch::Tensor() : scaled(loss_of(operation, shard), operation), samples);
    }
    if (operation.action == Action::kBackward) totals_[operation.id] = ddp_->last_batch();
  }

  torch::Tensor loss_of(const Operation& operation, int shard, bool break_backward = false) {
    const Batch batch =
        batch_of(operation, rank_, shard, samples_of_shard(operation, rank_, shard), plan_.dtype, plan_.dtype);
    return network_->loss(batch.data, batch.target, operation.unused[static_cast<std::size_t>(rank_)], break_backward);
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
        return ddp_->backward(loss, 2);
      }
      ddp_->backward(loss, 2);
    } catch (const std::exception& error) {
      if (std::string(error.what()).find("thrown by the program") == std::string::npos) throw;
    }
  }

  void step() {
    if (plan_.scaled)
      scaler_.step(*own_);
    else
      optimizer_->step();
  }

  void load(const Operation& operation) {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < network_->weights.size(); ++i)
      network_->weights[i].copy_(loaded_weight(operation, i, plan_, network_->weights[i].sizes()));
    ddp_->parameters_written();
  }

  static void write(const torch::Tensor& parameter) {
    const torch::NoGradGuard no_grad;
    parameter.mul_(0.5);
  }

  torch::Tensor& weight(const Operation& operation) {
    return network_->weights[static_cast<std::size_t>(operation.parameter)];
  }

  std::string difference_of_totals(const Expected& expected) const {
    std::string text;
    for (const auto& [id, right] : expected.totals) {
      const auto mine = totals_.find(id);
      if (mine == totals_.end()) continue;  // this rank was in join()
      const auto& [samples, loss] = mine->second;
      const bool same = plan_.scaled || std::abs(loss - right.mean_loss) <= tolerance(plan_) * (1 + right.mean_loss);
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
};

struct Outcome {
  std::array<std::string, kMaxRanks> errors;
  std::array<std::string, kMaxRanks> differences;
};

using AllExpected = std::vector<std::map<int, Expected>>;  // [trainer], by color

void run_rank(const Program& program, const AllExpected& expected, World& world, Outcome& outcome) {
  const auto rank = static_cast<std::size_t>(world.rank());
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (std::size_t i = 0; i < program.trainers.size(); ++i)
    trainers.push_back(std::make_unique<Trainer>(program.trainers[i], static_cast<int>(i), world));
  for (const Operation& operation : program.operations)
    if (has(operation.ranks, world.rank())) trainers[static_cast<std::size_t>(operation.trainer)]->run(operation);
  world.barrier();
  for (std::size_t i = 0; i < trainers.size() && !expected.empty(); ++i)
    outcome.differences[rank] += trainers[i]->difference_from(expected[i].at(trainers[i]->color()));
  world.barrier();
}

Outcome run(const Program& program, const AllExpected& expected) {
  Outcome outcome;
  try {
    run_ranks(program.ranks,
              [&](World& world) {
                try {
                  run_rank(program, expected, world, outcome);
                } catch (const std::exception& error) {
                  outcome.errors[static_cast<std::size_t>(world.rank())] = error.what();
                  throw;
                }
              },
              {.timeout = kTimeout});
  } catch (const std::exception&) {  // noted above
  }
  return outcome;
}

AllExpected expected_of(const Program& program) {
  AllExpected all;
  for (std::size_t i = 0; i < program.trainers.size(); ++i) {
    auto& of_trainer = all.emplace_back();
    for (int rank = 0; rank < program.ranks; ++rank) {
      const int color = program.trainers[i].color[static_cast<std::size_t>(rank)];
      if (!of_trainer.contains(color)) of_trainer.emplace(color, expected_of(program, i, color));
    }
  }
  return all;
}

std::string all_errors(const Outcome& outcome) {
  std::string text;
  for (std::size_t rank = 0; rank < kMaxRanks; ++rank)
    if (!outcome.errors[rank].empty()) text += "rank " + std::to_string(rank) + ": " + outcome.errors[rank] + "\n";
  return text;
}

std::string fault_of_legal(const Program& program) {
  const Outcome outcome = run(program, expected_of(program));
  if (const std::string errors = all_errors(outcome); !errors.empty()) return "a legal program was refused:\n" + errors;
  for (int rank = 0; rank < program.ranks; ++rank)
    if (const auto& text = outcome.differences[static_cast<std::size_t>(rank)]; !text.empty())
      return "rank " + std::to_string(rank) + " computed something else than one rank does:\n" + text;
  return {};
}

std::string fault_of_illegal(const Program& program, const Judgement& judgement) {
  const Outcome outcome = run(program, {});
  const std::string errors = all_errors(outcome);
  for (int rank = 0; rank < program.ranks; ++rank)
    if (outcome.errors[static_cast<std::size_t>(rank)].empty())
      return "rank " + std::to_string(rank) + " went on in spite of " + judgement.rule + "\n" + errors;
  const bool named = std::any_of(judgement.causes.begin(), judgement.causes.end(),
                                 [&](const std::string& cause) { return errors.find(cause) != std::string::npos; });
  return named ? "" : "no error names the cause: " + judgement.rule + "\n" + errors;
}

}  // namespace

std::string fault_of(const Program& program, const Judgement& judgement) {
  return judgement.verdict == Verdict::kLegal ? fault_of_legal(program) : fault_of_illegal(program, judgement);
}

}  // namespace lockstep::fuzz
