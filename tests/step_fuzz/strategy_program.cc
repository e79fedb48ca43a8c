// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/strategy_program.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <random>
#include <set>
#include <sstream>

#include "lockstep/strategy/option_names.h"
#include "tests/step_fuzz/network.h"
#include "tests/step_fuzz/reference_optimizer.h"
#include "tests/strategies.h"

namespace lockstep::fuzz {
namespace {

using Tensors = std::vector<torch::Tensor>;

// ---- The generator

class StrategyGenerator {
 public:
  explicit StrategyGenerator(std::uint64_t seed) : random_(seed * 7919 + 1) { program_.seed = seed; }

  StrategyProgram program() {
    const StrategyKind kinds[]{StrategyKind::kDdp,     StrategyKind::kTowers,    StrategyKind::kDataParallel,
                               StrategyKind::kKVStore, StrategyKind::kAveraging, StrategyKind::kPipeline};
    options().kind = kinds[between(0, 5)];
    options().timeout = std::chrono::seconds(20);
    model();
    optimizer();
    batches();
    devices();
    return program_;
  }

 private:
  StrategyOptions& options() { return program_.options; }

  void model() {
    for (int i = between(3, 6); i > 0; --i) program_.widths.push_back(between(1, 9));
    if (between(0, 9) == 0) program_.widths[1] = 700;
  }

  void optimizer() {
    TrainerPlan& plan = program_.plan;
    plan.rule = static_cast<Rule>(between(0, static_cast<int>(Rule::kLARS)));
    plan.lr = plan.rule == Rule::kAdam || plan.rule == Rule::kAdamW || plan.rule == Rule::kLAMB ? 0.01 : 0.05;
    if (between(0, 2) == 0) plan.weight_decay = 0.01;
    if (between(0, 3) == 0) options().clipping.max_norm = 0.3;
    if (between(0, 3) == 0) options().clipping.max_value = 0.05;
  }

  void batches() {
    const int usual = between(1, 12);
    for (int i = between(1, 8); i > 0; --i) {
      program_.batches.push_back(between(0, 2) == 0 ? between(1, 12) : usual);
      program_.rates.push_back(program_.plan.lr / between(1, 2));
    }
  }

  void devices() {
    options().algorithm = static_cast<Algorithm>(between(0, 3));
    switch (options().kind) {
      case StrategyKind::kDdp:
        program_.ranks = between(1, 4);
        options().ddp.share_parameters = between(0, 1) == 0;
        return;
      case StrategyKind::kTowers:
        options().devices = between(1, 4);
        options().towers.update = static_cast<UpdatePlace>(between(0, 1));
        return;
      case StrategyKind::kKVStore: return store();
      case StrategyKind::kAveraging: return averaging();
      case StrategyKind::kPipeline: return pipeline();
      default: options().devices = between(1, 4);
    }
    options().algorithm = Algorithm::kDirect;
  }

  void store() {
    options().algorithm = Algorithm::kDirect;
    auto& store = options().kvstore;
    options().devices = between(1, 3);
    store.kind = static_cast<KVStoreKind>(between(0, static_cast<int>(KVStoreKind::kDistSync)));
    if (store.kind != KVStoreKind::kDistSync) return;
    store.servers = between(1, 2);
    store.update_on_kvstore = between(0, 1) == 0;
    store.split_above = between(0, 1) == 0 ? 10 : 1'000'000;
    program_.ranks = store.servers + between(1, 3);
  }

  void averaging() {
    options().algorithm = Algorithm::kDirect;
    program_.ranks = between(1, 3);
    options().devices = between(1, 3);
    options().averaging.every = between(1, 4);
    if (between(0, 2) == 0) options().averaging.outer_lr = 0.7;
    if (between(0, 2) == 0) options().averaging.outer_momentum = 0.9;
  }

  void pipeline() {
    options().algorithm = Algorithm::kDirect;
    const int stages = between(1, 3);
    (between(0, 1) == 0 ? program_.ranks : options().devices) = stages;
    options().pipeline.micro_batches = between(1, 4);
    options().pipeline.schedule = static_cast<PipelineSchedule>(between(0, 2));
  }

  int between(int low, int high) { return std::uniform_int_distribution<>(low, high)(random_); }

  std::mt19937_64 random_;
  StrategyProgram program_;
};

// ---- The model and its data

// Linear, Tanh, Linear, ... with the same values in every replica.
std::shared_ptr<torch::nn::SequentialImpl> make_net(const StrategyProgram& program) {
  torch::nn::Sequential net;
  for (std::size_t i = 0; i + 1 < program.widths.size(); ++i) {
    if (i > 0) net->push_back(torch::nn::Tanh());
    net->push_back(torch::nn::Linear(program.widths[i], program.widths[i + 1]));
  }
  net->to(torch::kFloat64);
  const torch::NoGradGuard no_grad;
  double key = 0;
  for (torch::Tensor& p : net->parameters()) p.copy_(waves(p.sizes(), ++key) * 0.5);
  return net.ptr();
}

torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target) {
  return (output - target).square().mean();
}

Task task_of(const StrategyProgram& program) {
  return {.make_model = [program] { return make_net(program); },
          .forward =
              [](torch::nn::Module& model, const torch::Tensor& data) {
                return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(data);
              },
          .loss = loss_of,
          .name = "fuzz"};
}

Batch batch_of(const StrategyProgram& program, std::size_t step) {
  const double key = 100.0 + 10.0 * static_cast<double>(step);
  return {waves({program.batches[step], program.widths.front()}, key),
          waves({program.batches[step], program.widths.back()}, key + 0.5)};
}

// Rows [i B / n, (i + 1) B / n) of B.
Batch part(const Batch& batch, std::int64_t i, std::int64_t n) {
  const std::int64_t all = batch.data.size(0), begin = i * all / n, end = (i + 1) * all / n;
  return {batch.data.slice(0, begin, end), batch.target.slice(0, begin, end)};
}

// ---- The replay on one device

struct Course {
  Tensors parameters;
  std::vector<double> losses;
};

struct ReplayedReplica {
  explicit ReplayedReplica(const StrategyProgram& program)
      : net(make_net(program)), optimizer(make_reference_optimizer(program.plan, net->parameters())) {}

  // Returns samples * loss.
  double train(const Batch& batch, const ClippingOptions& clipping, double lr) {
    const std::int64_t count = batch.data.size(0);
    if (count == 0) return 0;
    net->zero_grad();
    const torch::Tensor loss = loss_of(net->forward(batch.data), batch.target);
    loss.backward();
    if (clipping.max_norm > 0) torch::nn::utils::clip_grad_norm_(net->parameters(), clipping.max_norm);
    if (clipping.max_value > 0) torch::nn::utils::clip_grad_value_(net->parameters(), clipping.max_value);
    optimizer->set_lr(lr);
    optimizer->step();
    samples += static_cast<double>(count);
    return static_cast<double>(count) * loss.item<double>();
  }

  std::shared_ptr<torch::nn::SequentialImpl> net;
  std::unique_ptr<ReferenceOptimizer> optimizer;
  double samples = 0;  // since the last average
};

// Local SGD: replicas that train alone, then their mean, weighted by samples; with an outer step DiLoCo. A single replica
// that is never averaged is every other strategy.
class Replay {
 public:
  explicit Replay(const StrategyProgram& program) : program_(program), averaging_(program.options.averaging) {
    const bool averages = program.options.kind == StrategyKind::kAveraging;
    for (int i = averages ? program.ranks * program.options.devices : 1; i > 0; --i) replicas_.emplace_back(program);
    if (!averages) averaging_ = {};
    for (const torch::Tensor& p : parameters(0)) anchor_.push_back(p.detach().clone().requires_grad_());
    outer_ = std::make_unique<torch::optim::SGD>(anchor_, torch::optim::SGDOptions(averaging_.outer_lr)
                                                              .momentum(averaging_.outer_momentum)
                                                              .nesterov(averaging_.outer_momentum > 0));
  }

  Course run() {
    Course course;
    const auto ranks = replicas_.size() > 1 ? program_.ranks : 1;
    const auto devices = static_cast<std::int64_t>(replicas_.size()) / ranks;
    std::int64_t since = 0;
    for (std::size_t step = 0; step < program_.batches.size(); ++step) {
      const Batch batch = batch_of(program_, step);
      double loss = 0;
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(replicas_.size()); ++i)
        loss +=
            replicas_[static_cast<std::size_t>(i)].train(part(part(batch, i / devices, ranks), i % devices, devices),
                                                         program_.options.clipping, program_.rates[step]);
      course.losses.push_back(loss / static_cast<double>(program_.batches[step]));
      if (++since % averaging_.every == 0) average();
    }
    if (since % averaging_.every != 0) average();
    for (const torch::Tensor& p : parameters(0)) course.parameters.push_back(p.detach().clone());
    return course;
  }

 private:
  std::vector<torch::Tensor> parameters(std::size_t replica) const { return replicas_[replica].net->parameters(); }

  void average() {
    if (program_.options.kind != StrategyKind::kAveraging) return;
    double samples = 0;
    for (const ReplayedReplica& replica : replicas_) samples += replica.samples;
    for (std::size_t i = 0; i < anchor_.size(); ++i) {
      torch::Tensor mean = torch::zeros_like(anchor_[i]);
      for (std::size_t r = 0; r < replicas_.size(); ++r)
        mean = mean + parameters(r)[i].detach() * (replicas_[r].samples / samples);
      anchor_[i].mutable_grad() = anchor_[i].detach() - mean;
    }
    outer_->step();
    const torch::NoGradGuard no_grad;
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
      for (std::size_t i = 0; i < anchor_.size(); ++i) parameters(r)[i].copy_(anchor_[i]);
      replicas_[r].samples = 0;
    }
  }

  const StrategyProgram& program_;
  AveragingOptions averaging_;
  std::vector<ReplayedReplica> replicas_;
  Tensors anchor_;
  std::unique_ptr<torch::optim::SGD> outer_;
};

// ---- The run

OptimizerOptions optimizer_of(const TrainerPlan& plan) {
  const double lr = plan.lr, decay = plan.weight_decay;
  switch (plan.rule) {
    case Rule::kSGD: return SGDOptions{.lr = lr, .weight_decay = decay};
    case Rule::kMomentum: return SGDOptions{.lr = lr, .momentum = 0.9, .weight_decay = decay};
    case Rule::kNesterov: return SGDOptions{.lr = lr, .momentum = 0.9, .nesterov = true, .weight_decay = decay};
    case Rule::kAdam: return AdamOptions{.lr = lr, .eps = kAdamEps, .weight_decay = decay};
    case Rule::kAdamW: return AdamWOptions{.lr = lr, .eps = kAdamEps, .weight_decay = decay};
    case Rule::kLAMB: return LAMBOptions{.lr = lr, .eps = kAdamEps, .weight_decay = decay};
    case Rule::kLARS: return LARSOptions{.lr = lr, .momentum = 0.9, .weight_decay = decay, .trust = kLarsTrust};
  }
  return {};
}

Course run_rank(const StrategyProgram& program, const World& world) {
  StrategyOptions options = program.options;
  options.optimizer = optimizer_of(program.plan);
  const auto strategy = make_strategy(world, task_of(program), options);
  const World share = strategy->data_world(world);
  Course course;
  for (std::size_t step = 0; step < program.batches.size(); ++step) {
    set_learning_rate(strategy->optimizer(), program.rates[step]);
    const Batch mine = testing::part_of(batch_of(program, step), *strategy, share);
    course.losses.push_back(strategy->forward_backward(mine).mean_loss);
    strategy->update();
  }
  strategy->synchronise();
  for (const torch::Tensor& p : strategy->model().parameters()) course.parameters.push_back(p.detach().clone());
  world.barrier();
  return course;
}

// float64: rounding only.
std::string difference(const Course& course, const Course& expected) {
  constexpr double kTolerance = 1e-9;
  std::ostringstream text;
  for (std::size_t i = 0; i < course.parameters.size(); ++i)
    if (!torch::allclose(course.parameters[i], expected.parameters[i], kTolerance, kTolerance))
      text << "parameter " << i << " is off by "
           << (course.parameters[i] - expected.parameters[i]).abs().max().item<double>() << '\n';
  for (std::size_t step = 0; step < expected.losses.size(); ++step)
    if (!(std::abs(course.losses[step] - expected.losses[step]) <= kTolerance * (1 + expected.losses[step])))
      text << "the loss of step " << step << " is " << course.losses[step] << ", not " << expected.losses[step] << '\n';
  return text.str();
}

}  // namespace

StrategyProgram random_strategy_program(std::uint64_t seed) { return StrategyGenerator(seed).program(); }

std::vector<std::string> features_of(const StrategyProgram& program) {
  const StrategyOptions& options = program.options;
  std::set<std::string> features{strategy_info(options.kind).name, name_of(program.plan.rule)};
  features.insert(std::to_string(program.ranks) + " ranks");
  features.insert(std::to_string(options.devices) + " devices");
  const auto note = [&](bool there, const std::string& name) {
    if (there) features.insert(name);
  };
  note(options.kind == StrategyKind::kKVStore, name_of(options.kvstore.kind));
  note(options.kvstore.kind == KVStoreKind::kDistSync && !options.kvstore.update_on_kvstore, "workers update");
  note(options.kind == StrategyKind::kAveraging, "average every " + std::to_string(options.averaging.every));
  note(options.averaging.outer_momentum > 0 || options.averaging.outer_lr != 1, "outer step");
  note(options.kind == StrategyKind::kPipeline, name_of(options.pipeline.schedule));
  note(options.kind == StrategyKind::kTowers, std::string("update on ") + name_of(options.towers.update));
  note(options.algorithm != Algorithm::kDirect, std::string("all-reduce ") + name_of(options.algorithm));
  note(options.clipping.max_norm > 0, "clipping by norm");
  note(options.clipping.max_value > 0, "clipping by value");
  note(program.plan.weight_decay > 0, "weight decay");
  note(*std::ranges::min_element(program.batches) < program.ranks * options.devices, "fewer samples than devices");
  note(*std::ranges::max_element(program.widths) > 100, "a large layer");
  return {features.begin(), features.end()};
}

std::string text_of(const StrategyProgram& program) {
  std::ostringstream text;
  text << "seed " << program.seed << ":";
  for (const std::string& feature : features_of(program)) text << ' ' << feature << ',';
  text << " lr " << program.plan.lr << ", micro-batches " << program.options.pipeline.micro_batches << ", widths";
  for (const std::int64_t width : program.widths) text << ' ' << width;
  text << ", batches";
  for (const std::int64_t batch : program.batches) text << ' ' << batch;
  text << '\n';
  return text.str();
}

std::string fault_of(const StrategyProgram& program) try {
  const Course expected = Replay(program).run();
  std::string faults;
  std::mutex mutex;
  run_ranks(program.ranks,
            [&](World& world) {
              const Course course = run_rank(program, world);
              const std::string text = difference(course, expected);
              const std::lock_guard lock(mutex);
              if (!text.empty()) faults += "rank " + std::to_string(world.rank()) + ": " + text;
            },
            {.timeout = std::chrono::seconds(20)});
  return faults;
} catch (const std::exception& error) {
  return std::string("refused: ") + error.what() + "\n";
}

StrategyProgram shortest(StrategyProgram program) {
  const auto attempt = [&](const auto& change) {
    StrategyProgram simpler = program;
    change(simpler);
    if (text_of(simpler) == text_of(program) || fault_of(simpler).empty()) return false;
    program = simpler;
    return true;
  };
  while (program.batches.size() > 1 && attempt([](StrategyProgram& simpler) { simpler.batches.pop_back(); })) {
  }
  while (program.widths.size() > 2 && attempt([](StrategyProgram& simpler) { simpler.widths.pop_back(); })) {
  }
  attempt([](StrategyProgram& simpler) { simpler.plan.rule = Rule::kSGD; });
  attempt([](StrategyProgram& simpler) { simpler.plan.weight_decay = 0; });
  attempt([](StrategyProgram& simpler) { simpler.options.clipping = {}; });
  attempt([](StrategyProgram& simpler) { simpler.options.devices = 1; });
  attempt([](StrategyProgram& simpler) { simpler.options.averaging = {}; });
  return program;
}

}  // namespace lockstep::fuzz
