#include "lockstep/strategy/averaging/averaging.h"

#include <algorithm>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/averaging/flat_block.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/towers.h"

namespace lockstep {
namespace {

std::size_t place_of(const Device& device) { return static_cast<std::size_t>(device.index()); }

void require_sensible(const AveragingOptions& options) {
  if (options.every < 1)
    throw UsageError({.what = concat("--average-every ", options.every), .next = "give batches, at least 1"});
  if (options.outer_lr <= 0 || options.outer_momentum < 0)
    throw UsageError({.what = concat("--outer-lr ", options.outer_lr, ", --outer-momentum ", options.outer_momentum),
                      .next = "give a positive rate and a momentum of at least 0"});
}

// The average as it is, or a step towards it.
class OuterStep {
 public:
  OuterStep() = default;
  OuterStep(const torch::Tensor& block, const AveragingOptions& options) {
    if (options.outer_lr == 1 && options.outer_momentum == 0) return;
    anchor_ = block.clone().requires_grad_();
    sgd_ = std::make_unique<SGD>(
        std::vector<torch::Tensor>{anchor_},
        SGDOptions{.lr = options.outer_lr, .momentum = options.outer_momentum, .nesterov = options.outer_momentum > 0});
    // From the start, so that there is something to restore a checkpoint into.
    Optimizer::StateTensors state{{"step", torch::ones({})}};
    if (options.outer_momentum > 0) state["momentum_buffer"] = torch::zeros_like(block);
    sgd_->set_state(anchor_, state);
  }

  bool does_anything() const { return sgd_ != nullptr; }

  // average: what the nets agreed on, replaced by where the outer step leads.
  void apply(const torch::Tensor& average) {
    if (!sgd_) return;
    const torch::NoGradGuard no_grad;
    anchor_.mutable_grad() = anchor_.detach() - average;
    sgd_->step();
    average.copy_(anchor_);
  }

  void restart_from(const torch::Tensor& block) {
    const torch::NoGradGuard no_grad;
    if (sgd_) anchor_.copy_(block);
  }

  std::vector<NamedTensor> state() const {
    std::vector<NamedTensor> tensors;
    if (sgd_)
      for (const auto& [name, tensor] : sgd_->state_of(anchor_))
        if (tensor.defined()) tensors.push_back({"outer." + name, tensor});
    return tensors;
  }

 private:
  torch::Tensor anchor_;
  std::unique_ptr<SGD> sgd_;
};

class Averaging : public Strategy {
 public:
  Averaging(const World& world, const Task& task, const StrategyOptions& options)
      : world_(world),
        task_(task),
        average_every_(options.averaging.every),
        devices_({.count = options.devices, .cores = world.cores(), .timeout = options.timeout}),
        nets_(make_replicas(options.devices, task, options)),
        samples_(nets_.size()) {
    require_sensible(options.averaging);
    require_same_model(world, named_parameters(model()));
    broadcast_tensors(world, named_parameters(model()));
    broadcast_tensors(world, named_buffers(model()));
    make_blocks();
    follow_first(nets_);
    outer_ = OuterStep(blocks_.front(), options.averaging);
    seed_steps(options.seed + static_cast<std::uint64_t>(world.rank()) + 1);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    const auto parts = parts_of(batch, devices_.size());
    const Stopwatch watch;
    const auto losses = forward_and_backward(parts);
    phases_.backward += watch.seconds();
    BatchMean mean;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      samples_[i] += parts[i].size();
      if (losses[i].defined()) mean.add(parts[i].size(), losses[i].item<double>());
    }
    return over_all_ranks(mean);
  }

  void update() override {
    const Stopwatch watch;
    follow_learning_rate(nets_);
    devices_.run([nets = nets_](Device& device) { nets[place_of(device)].optimizer->step(); });
    phases_.update += watch.seconds();
    if (++batches_since_average_ == average_every_) average();
  }

  void synchronise() override {
    if (batches_since_average_ > 0) average();
    if (world_.size() > 1) {
      broadcast_tensors(world_, named_buffers(model()));
      optimizer().broadcast_state(world_, 0);
    }
    follow_first(nets_);
  }

  void restored(std::int64_t) override {
    follow_first(nets_);
    outer_.restart_from(blocks_.front());
  }

  torch::Tensor forward(const torch::Tensor& data) override { return nets_.front().forward(task_, data); }
  torch::nn::Module& model() override { return *nets_.front().model; }
  Optimizer& optimizer() override { return *nets_.front().optimizer; }
  const PhaseTimes& phases() const override { return phases_; }
  std::vector<NamedTensor> state() override { return outer_.state(); }
  std::vector<std::string> devices() const override { return devices_.names(); }

  Report report() const override {
    return {{"average_every", static_cast<double>(average_every_)},
            {"averages", static_cast<double>(averages_)},
            {"block_bytes", static_cast<double>(blocks_.front().nbytes())},
            {"exchanged_bytes",
             world_.size() > 1 ? static_cast<double>(averages_) * static_cast<double>(blocks_.front().nbytes()) : 0.0}};
  }

 private:
  // Net 0's lies where other processes can read it.
  void make_blocks() {
    for (std::size_t i = 0; i < nets_.size(); ++i)
      blocks_.push_back(make_flat_block(*nets_[i].model, [&](torch::IntArrayRef sizes, const auto& options) {
        return i == 0 ? world_.allocate(sizes, options) : torch::empty(sizes, options);
      }));
  }

  std::vector<torch::Tensor> forward_and_backward(const std::vector<Batch>& parts) {
    const auto losses = std::make_shared<std::vector<torch::Tensor>>(parts.size());
    devices_.run([losses, parts, task = task_, nets = nets_, seed = draw_seed()](Device& device) {
      const std::size_t i = place_of(device);
      nets[i].optimizer->zero_grad();
      if (parts[i].size() == 0) return;
      device.seed(seed_of(seed, device.index()));
      const torch::Tensor loss = task.loss(nets[i].forward(task, parts[i].data), parts[i].target);
      loss.backward();
      (*losses)[i] = loss.detach();
    });
    return *losses;
  }

  BatchTotals over_all_ranks(const BatchMean& mine) const {
    if (world_.size() == 1) return mine.totals();
    const BatchTotals totals = mine.totals();
    const auto samples = static_cast<double>(totals.samples);
    const torch::Tensor sums =
        torch::tensor({samples, totals.samples > 0 ? totals.mean_loss * samples : 0.0}, torch::kFloat64);
    world_.all_reduce(sums);
    const auto* sum = sums.const_data_ptr<double>();
    return {.samples = static_cast<std::int64_t>(sum[0]), .mean_loss = sum[1] / sum[0]};
  }

  void average() {
    const Stopwatch watch;
    const std::int64_t all = samples_of_all_ranks();
    batches_since_average_ = 0;
    if (all == 0) return;
    collect_on_net_0(all);
    world_.all_reduce(blocks_.front());
    outer_.apply(blocks_.front());
    copy_back();
    std::fill(samples_.begin(), samples_.end(), 0);
    ++averages_;
    phases_.exchange += watch.seconds();
  }

  std::int64_t samples_of_all_ranks() const {
    const torch::Tensor samples = torch::tensor({std::accumulate(samples_.begin(), samples_.end(), std::int64_t{0})});
    world_.all_reduce(samples);
    return samples.item<std::int64_t>();
  }

  void collect_on_net_0(std::int64_t all) {
    devices_.run([blocks = blocks_, samples = samples_, all](Device& device) {
      const std::size_t i = place_of(device);
      const torch::NoGradGuard no_grad;
      torch::Tensor(blocks[i]).mul_(static_cast<double>(samples[i]) / static_cast<double>(all));
      device.reduce(blocks[i]);
    });
  }

  void copy_back() {
    if (nets_.size() > 1)
      devices_.run([blocks = blocks_](Device& device) { device.broadcast(blocks[place_of(device)]); });
  }

  World world_;
  Task task_;
  std::int64_t average_every_;
  Devices devices_;
  Replicas nets_;
  std::vector<torch::Tensor> blocks_;
  std::vector<std::int64_t> samples_;  // that each net saw since the last average
  OuterStep outer_;
  std::int64_t batches_since_average_ = 0;
  std::int64_t averages_ = 0;
  PhaseTimes phases_;
};

}  // namespace

std::unique_ptr<Strategy> make_averaging(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<Averaging>(world, task, options);
}

}  // namespace lockstep
