// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/strategy_program.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <sstream>

#include "lockstep/model/partial_model.h"
#include "lockstep/strategy/option_names.h"
#include "tests/step_fuzz/network.h"
#include "tests/step_fuzz/reference_optimizer.h"
#include "tests/strategies.h"
#include "tests/worlds.h"

namespace lockstep::fuzz {
namespace {

using Tensors = std::vector<torch::Tensor>;

bool is_asynchronous(const StrategyProgram& program) {
  return program.options.kind == StrategyKind::kKVStore && program.options.kvstore.kind > KVStoreKind::kDistSync;
}
int workers_of(const StrategyProgram& program) { return program.ranks - program.options.kvstore.servers; }
bool is_wide(const StrategyProgram& program) { return std::ranges::max(program.widths) > 100; }

// ---- The generator

class StrategyGenerator {
 public:
  explicit StrategyGenerator(uint64_t seed) : random_(seed * 7919 + 1) { program_.seed = seed; }

  StrategyProgram program() {
    const StrategyKind kinds[]{StrategyKind::kDdp,     StrategyKind::kTowers,    StrategyKind::kDataParallel,
                               StrategyKind::kKVStore, StrategyKind::kAveraging, StrategyKind::kPipeline};
    options().kind = kinds[between(0, 5)];
    options().timeout = std::chrono::seconds(20);
    model();
    optimizer();
    batches();
    devices();
    machines();
    if (is_asynchronous(program_)) order();
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
        options().towers.update = static_cast<UpdateOn>(between(0, 1));
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
    store.kind = static_cast<KVStoreKind>(between(0, static_cast<int>(KVStoreKind::kDistBounded)));
    if (store.kind < KVStoreKind::kDistSync) return;
    store.servers = between(1, 2);
    store.update_on_kvstore = store.kind > KVStoreKind::kDistSync || between(0, 1) == 0;
    if (between(0, 1) == 0 && !is_layerwise(program_.plan)) store.split_above = 10;
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

  void machines() {
    const bool possible = options().kind == StrategyKind::kDdp || options().kind == StrategyKind::kAveraging ||
                          options().kind == StrategyKind::kKVStore;
    if (!possible || program_.ranks == 1 || between(0, 3) > 0) return;
    program_.machines = between(2, std::min(program_.ranks, 3));
    if (options().algorithm != Algorithm::kRing) options().algorithm = Algorithm::kDirect;
  }

  // With several workers dist_bounded never waits: the order is this one.
  void order() {
    const int workers = workers_of(program_), steps = static_cast<int>(program_.batches.size());
    for (int i = 0; i < workers * steps; ++i) program_.order.push_back(i % workers);
    std::ranges::shuffle(program_.order, random_);
    options().kvstore.staleness = workers == 1 ? between(0, 3) : workers * (steps + 1);
  }

  int between(int low, int high) { return std::uniform_int_distribution<>(low, high)(random_); }

  std::mt19937_64 random_;
  StrategyProgram program_;
};

// ---- The model and its data

// Linear, Tanh, Linear, ... with the same values in every replica.
std::shared_ptr<torch::nn::SequentialImpl> make_net(const StrategyProgram& program) {
  torch::nn::Sequential net;
  for (size_t i = 0; i + 1 < program.widths.size(); ++i) {
    if (i > 0) net->push_back(torch::nn::Tanh());
    net->push_back(torch::nn::Linear(program.widths[i], program.widths[i + 1]));
  }
  net->to(torch::kFloat64);
  const torch::NoGradGuard no_grad;
  double key = 0;
  for (torch::Tensor& p : net->parameters()) p.copy_(waves(p.sizes(), ++key) * (is_wide(program) ? 0.05 : 0.5));
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

Batch batch_of(const StrategyProgram& program, size_t step) {
  const double key = 100.0 + 10.0 * static_cast<double>(step);
  return {waves({program.batches[step], program.widths.front()}, key),
          waves({program.batches[step], program.widths.back()}, key + 0.5)};
}

// Rows [i B / n, (i + 1) B / n) of B.
Batch part(const Batch& batch, int64_t i, int64_t n) {
  const int64_t all = batch.data.size(0), begin = i * all / n, end = (i + 1) * all / n;
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
    const int64_t count = batch.data.size(0);
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
    const auto devices = static_cast<int64_t>(replicas_.size()) / ranks;
    int64_t since = 0;
    for (size_t step = 0; step < program_.batches.size(); ++step) {
      const Batch batch = batch_of(program_, step);
      double loss = 0;
      for (int64_t i = 0; i < static_cast<int64_t>(replicas_.size()); ++i)
        loss += replicas_[static_cast<size_t>(i)].train(part(part(batch, i / devices, ranks), i % devices, devices),
                                                        program_.options.clipping, program_.rates[step]);
      course.losses.push_back(loss / static_cast<double>(program_.batches[step]));
      if (++since % averaging_.every == 0) average();
    }
    if (since % averaging_.every != 0) average();
    for (const torch::Tensor& p : parameters(0)) course.parameters.push_back(p.detach().clone());
    return course;
  }

 private:
  std::vector<torch::Tensor> parameters(size_t replica) const { return replicas_[replica].net->parameters(); }

  void average() {
    if (program_.options.kind != StrategyKind::kAveraging) return;
    double samples = 0;
    for (const ReplayedReplica& replica : replicas_) samples += replica.samples;
    for (size_t i = 0; i < anchor_.size(); ++i) {
      torch::Tensor mean = torch::zeros_like(anchor_[i]);
      for (size_t r = 0; r < replicas_.size(); ++r)
        mean = mean + parameters(r)[i].detach() * (replicas_[r].samples / samples);
      anchor_[i].mutable_grad() = anchor_[i].detach() - mean;
    }
    outer_->step();
    const torch::NoGradGuard no_grad;
    for (size_t r = 0; r < replicas_.size(); ++r) {
      for (size_t i = 0; i < anchor_.size(); ++i) parameters(r)[i].copy_(anchor_[i]);
      replicas_[r].samples = 0;
    }
  }

  const StrategyProgram& program_;
  AveragingOptions averaging_;
  std::vector<ReplayedReplica> replicas_;
  Tensors anchor_;
  std::unique_ptr<torch::optim::SGD> outer_;
};

// dist_async and dist_bounded: workers push in the order of the program, each the gradient of its own next batch at the
// weights that it pulled after its last push. docs/strategies/kvstore.md says what a server does with it.
class AsynchronousReplay {
 public:
  explicit AsynchronousReplay(const StrategyProgram& program)
      : program_(program), workers_(static_cast<size_t>(workers_of(program))), server_(make_net(program)) {
    TrainerPlan plan = program.plan;
    if (workers_.size() > 1 && plan.rule == Rule::kMomentum) plan.rule = Rule::kNesterov;
    for (Worker& worker : workers_) {
      worker.net = make_net(program);
      worker.optimizer = make_reference_optimizer(plan, server_->parameters());
    }
  }

  // Of each rank: servers, of which only the first knows the result, then workers.
  std::vector<Course> run() {
    for (const int worker : program_.order) update(static_cast<size_t>(worker));
    std::vector<Course> courses(static_cast<size_t>(program_.ranks));
    const auto servers = static_cast<size_t>(program_.options.kvstore.servers);
    courses.front().parameters = values_of(*server_);
    for (size_t i = 0; i < workers_.size(); ++i)
      courses[servers + i] = {.parameters = values_of(*workers_[i].net), .losses = workers_[i].losses};
    return courses;
  }

 private:
  struct Worker {
    std::shared_ptr<torch::nn::SequentialImpl> net;
    std::unique_ptr<ReferenceOptimizer> optimizer;  // its state of the server's weights
    std::vector<double> losses;                     // NaN: it had no samples
    double last_samples = 0;
  };

  static Tensors values_of(const torch::nn::SequentialImpl& net) {
    Tensors values;
    for (const torch::Tensor& p : net.parameters()) values.push_back(p.detach().clone());
    return values;
  }

  void update(size_t index) {
    Worker& worker = workers_[index];
    const size_t step = worker.losses.size();
    const Batch batch = part(batch_of(program_, step), static_cast<int64_t>(index), std::ssize(workers_));
    worker.last_samples = static_cast<double>(batch.data.size(0));
    worker.losses.push_back(std::nan(""));
    if (worker.last_samples > 0) {
      worker.net->zero_grad();
      const torch::Tensor loss = loss_of(worker.net->forward(batch.data), batch.target);
      loss.backward();
      worker.losses.back() = loss.item<double>();
      apply(worker, program_.rates[step]);
    }
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < server_->parameters().size(); ++i)
      worker.net->parameters()[i].copy_(server_->parameters()[i]);
  }

  void apply(Worker& worker, double lr) {
    double all = 0;
    for (const Worker& other : workers_) all += other.losses.empty() ? worker.last_samples : other.last_samples;
    const auto& clipping = program_.options.clipping;
    for (size_t i = 0; i < server_->parameters().size(); ++i)
      server_->parameters()[i].mutable_grad() = worker.net->parameters()[i].grad().clone();
    if (clipping.max_norm > 0) torch::nn::utils::clip_grad_norm_(server_->parameters(), clipping.max_norm);
    if (clipping.max_value > 0) torch::nn::utils::clip_grad_value_(server_->parameters(), clipping.max_value);
    worker.optimizer->set_lr(lr * worker.last_samples / all);
    worker.optimizer->step();
  }

  const StrategyProgram& program_;
  std::vector<Worker> workers_;
  std::shared_ptr<torch::nn::SequentialImpl> server_;
};

// What each rank computes.
std::vector<Course> expected_of(const StrategyProgram& program) {
  if (is_asynchronous(program)) return AsynchronousReplay(program).run();
  return std::vector<Course>(static_cast<size_t>(program.ranks), Replay(program).run());
}

// ---- The run

// Lets the workers of an asynchronous store update in the order of the program, once all have pulled their first weights.
class Turns {
 public:
  explicit Turns(const StrategyProgram& program) : order_(program.order), missing_(workers_of(program)) {}

  void has_weights() {
    const std::lock_guard lock(mutex_);
    --missing_;
    changed_.notify_all();
  }

  void take(int worker, const std::function<void()>& update) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kLongest, [&] { return missing_ == 0 && order_[next_] == worker; }))
      throw std::runtime_error("another worker did not take its turn");
    update();
    ++next_;
    changed_.notify_all();
  }

 private:
  static constexpr std::chrono::seconds kLongest{20};
  std::vector<int> order_;
  int missing_;
  size_t next_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

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

// Where devices are GPUs, each worker has the next ones.
std::vector<DevicePlace> places_of_worker(int worker, int devices) {
  std::vector<DevicePlace> places = testing::test_places((worker + 1) * devices);
  if (!places.empty()) places.erase(places.begin(), places.end() - devices);
  return places;
}

Course run_rank(const StrategyProgram& program, const World& world, Turns& turns) {
  StrategyOptions options = program.options;
  options.optimizer = optimizer_of(program.plan);
  const int worker = is_asynchronous(program) ? world.rank() - options.kvstore.servers : -1;
  if (worker >= 0) options.places = places_of_worker(worker, options.devices);
  const auto strategy = make_strategy(world, task_of(program), options);
  const World share = strategy->ranks(world).data;
  Course course;
  for (size_t step = 0; step < program.batches.size(); ++step) {
    set_learning_rate(strategy->optimizer(), program.rates[step]);
    const Batch mine = testing::part_of(batch_of(program, step), *strategy, share);
    course.losses.push_back(strategy->forward_backward(mine).mean_loss);
    if (worker >= 0 && step == 0) turns.has_weights();
    worker >= 0 ? turns.take(worker, [&] { strategy->update(); }) : strategy->update();
  }
  strategy->synchronise();
  for (const torch::Tensor& p : strategy->model().parameters())
    course.parameters.push_back(is_held(p) ? p.detach().cpu().clone() : torch::Tensor());  // another stage has it
  world.barrier();
  return course;
}

// float64: rounding only. What is not expected is not compared.
std::string difference(const Course& course, const Course& expected) {
  constexpr double kTolerance = 1e-9;
  std::ostringstream text;
  for (size_t i = 0; i < expected.parameters.size(); ++i)
    if (course.parameters[i].defined() &&
        !torch::allclose(course.parameters[i], expected.parameters[i], kTolerance, kTolerance))
      text << "parameter " << i << " is off by "
           << (course.parameters[i] - expected.parameters[i]).abs().max().item<double>() << '\n';
  for (size_t step = 0; step < expected.losses.size(); ++step)
    if (!std::isnan(expected.losses[step]) &&
        !(std::abs(course.losses[step] - expected.losses[step]) <= kTolerance * (1 + expected.losses[step])))
      text << "the loss of step " << step << " is " << course.losses[step] << ", not " << expected.losses[step] << '\n';
  return text.str();
}

}  // namespace

StrategyProgram random_strategy_program(uint64_t seed) { return StrategyGenerator(seed).program(); }

StrategyProgram workers_in_turn(KVStoreKind kind, Rule rule, int workers, int devices) {
  constexpr int kServers = 1, kBatches = 20;
  StrategyProgram program{.ranks = kServers + workers, .plan = {.rule = rule}, .widths = {6, 8, 7, 4}};
  program.plan.lr = rule == Rule::kAdamW ? 0.01 : 0.1;
  program.options = {.kind = StrategyKind::kKVStore,
                     .devices = devices,
                     .timeout = std::chrono::seconds(20),
                     .kvstore = {.kind = kind, .servers = kServers, .staleness = workers - 1, .split_above = 40}};
  program.batches.assign(kBatches, 10);  // 3 and 4 workers have parts of different sizes
  program.rates.assign(kBatches, program.plan.lr);
  for (int i = 0; i < workers * kBatches; ++i) program.order.push_back(i % workers);
  return program;
}

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
  note(program.machines > 1, std::to_string(program.machines) + " machines");
  note(options.kind == StrategyKind::kAveraging, "average every " + std::to_string(options.averaging.every));
  note(options.averaging.outer_momentum > 0 || options.averaging.outer_lr != 1, "outer step");
  note(options.kind == StrategyKind::kPipeline, name_of(options.pipeline.schedule));
  note(options.kind == StrategyKind::kTowers, std::string("update on ") + name_of(options.towers.update));
  note(options.algorithm != Algorithm::kDirect, std::string("all-reduce ") + name_of(options.algorithm));
  note(options.clipping.max_norm > 0, "clipping by norm");
  note(options.clipping.max_value > 0, "clipping by value");
  note(program.plan.weight_decay > 0, "weight decay");
  note(*std::ranges::min_element(program.batches) < program.ranks * options.devices, "fewer samples than devices");
  note(is_wide(program), "a large layer");
  return {features.begin(), features.end()};
}

std::string text_of(const StrategyProgram& program) {
  std::ostringstream text;
  text << "seed " << program.seed << ":";
  for (const std::string& feature : features_of(program)) text << ' ' << feature << ',';
  text << " lr " << program.plan.lr << ", micro-batches " << program.options.pipeline.micro_batches << ", widths";
  for (const int64_t width : program.widths) text << ' ' << width;
  text << ", batches";
  for (const int64_t batch : program.batches) text << ' ' << batch;
  if (!program.order.empty()) text << ", order of workers";
  for (const int worker : program.order) text << ' ' << worker;
  text << '\n';
  return text.str();
}

std::string refusal_of(const StrategyProgram& program) {
  const StrategyOptions& options = program.options;
  if (options.clipping.max_norm == 0) return {};
  if (options.kind == StrategyKind::kPipeline && program.ranks > 1) return "stages that are processes";
  if (options.kind == StrategyKind::kKVStore && options.kvstore.kind >= KVStoreKind::kDistSync &&
      options.kvstore.update_on_kvstore && options.kvstore.servers > 1)
    return "none of them knows the norm of all gradients";
  return {};
}

std::string fault_of(const StrategyProgram& program) {
  const std::string refusal = refusal_of(program);
  const std::vector<Course> expected = expected_of(program);
  std::string faults;
  std::mutex mutex;
  Turns turns(program);
  const auto body = [&](World& world) {
    const std::string text = difference(run_rank(program, world, turns), expected[static_cast<size_t>(world.rank())]);
    const std::lock_guard lock(mutex);
    if (!text.empty()) faults += "rank " + std::to_string(world.rank()) + ": " + text;
  };
  try {
    if (program.machines > 1) {
      testing::Nodes machines;
      for (int rank = 0; rank < program.ranks; ++rank) machines.push_back(rank % program.machines);
      testing::run_over_machines(machines, body, {.timeout = std::chrono::seconds(20)});
    } else {
      run_ranks(program.ranks, body, {.timeout = std::chrono::seconds(20)});
    }
  } catch (const std::exception& error) {
    const bool named = !refusal.empty() && std::string(error.what()).find(refusal) != std::string::npos;
    return named ? "" : std::string("refused: ") + error.what() + "\n";
  }
  return refusal.empty() ? faults : "not refused: " + refusal + "\n";
}

StrategyProgram shortest(StrategyProgram program) {
  const bool was_refused = fault_of(program).starts_with("refused");
  const auto attempt = [&](const auto& change) {
    StrategyProgram simpler = program;
    change(simpler);
    const std::string fault = fault_of(simpler);
    const bool is_refused = fault.starts_with("refused");
    if (text_of(simpler) == text_of(program) || fault.empty() || is_refused != was_refused) return false;
    program = simpler;
    return true;
  };
  while (program.batches.size() > 1 && program.order.empty() &&
         attempt([](StrategyProgram& simpler) { simpler.batches.pop_back(); })) {
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
