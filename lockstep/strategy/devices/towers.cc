#include "lockstep/towers.h"

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/strategy/devices/thread_generator.h"

namespace lockstep {

Replicas get_params(const Devices& devices, const Task& task, const StrategyOptions& options) {
  return make_replicas(devices.size(), task, options);
}

std::vector<Batch> split_and_load(const Batch& batch, const Devices& devices, Uneven uneven) {
  if (uneven == Uneven::kRefuse && batch.size() % devices.size() != 0)
    throw UsageError({.what = concat("a batch of ", batch.size(), " samples does not divide evenly over ",
                                     devices.size(), " devices"),
                      .likely = "the last batch of an epoch, or a --batch-size that is no multiple of the devices",
                      .next = "leave out --refuse-uneven: an uneven split is exact"});
  std::vector<Batch> shards = parts_of(batch, devices.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const torch::Device device = devices.where(static_cast<int>(i));
    shards[i] = {shards[i].data.to(device), shards[i].target.to(device)};
  }
  return shards;
}

std::vector<torch::Tensor> tower_losses(Devices& devices, const Task& task, const Replicas& replicas,
                                        const std::vector<Batch>& shards) {
  const auto losses = std::make_shared<std::vector<torch::Tensor>>(shards.size());
  devices.run([losses, task, replicas, shards, seed = draw_seed()](Device& device) {
    const auto i = static_cast<std::size_t>(device.index());
    replicas[i].optimizer->zero_grad();
    if (shards[i].size() == 0) return;
    device.seed(seed_of(seed, device.index()));
    (*losses)[i] = task.loss(replicas[i].forward(task, shards[i].data), shards[i].target);
  });
  return *losses;
}

void backward(Devices& devices, const std::vector<torch::Tensor>& losses, const std::vector<Batch>& shards) {
  std::int64_t samples = 0;
  for (const Batch& shard : shards) samples += shard.size();
  devices.run([losses, shards, samples](Device& device) {
    const auto i = static_cast<std::size_t>(device.index());
    if (!losses[i].defined()) return;
    losses[i].backward(
        torch::full_like(losses[i], static_cast<double>(shards[i].size()) / static_cast<double>(samples)));
  });
}

void update(Devices& devices, const Replicas& replicas) {
  devices.run([replicas](Device& device) { replicas[static_cast<std::size_t>(device.index())].optimizer->step(); });
}

namespace {

class Towers : public Strategy {
 public:
  Towers(const World& world, const Task& task, const StrategyOptions& options)
      : task_(task),
        devices_({.count = options.devices, .cores = world.cores(), .timeout = options.timeout}),
        replicas_(get_params(devices_, task, options)),
        uneven_(options.towers.refuse_uneven ? Uneven::kRefuse : Uneven::kSplit),
        algorithm_(options.algorithm),
        update_on_cpu_(options.towers.update == UpdatePlace::kCpu) {
    if (update_on_cpu_) gradients_ = share_parameters(devices_, replicas_);
    seed_steps(options.seed + 1);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    const auto shards = split_and_load(batch, devices_, uneven_);
    Stopwatch watch;
    const auto losses = tower_losses(devices_, task_, replicas_, shards);
    phases_.forward += watch.seconds();
    watch = Stopwatch();
    backward(devices_, losses, shards);
    phases_.backward += watch.seconds();
    watch = Stopwatch();
    combine();
    phases_.exchange += watch.seconds();
    return mean_of(losses, shards);
  }

  void update() override {
    const Stopwatch watch;
    if (update_on_cpu_) {
      replicas_.front().optimizer->step();
    } else {
      follow_learning_rate(replicas_);
      lockstep::update(devices_, replicas_);
    }
    phases_.update += watch.seconds();
  }

  torch::Tensor forward(const torch::Tensor& data) override { return replicas_.front().forward(task_, data); }
  torch::nn::Module& model() override { return *replicas_.front().model; }
  Optimizer& optimizer() override { return *replicas_.front().optimizer; }
  const PhaseTimes& phases() const override { return phases_; }
  void restored(std::int64_t) override { update_on_cpu_ ? follow_model(replicas_) : follow_first(replicas_); }
  std::vector<std::string> devices() const override { return devices_.names(); }

 private:
  // With the variables on the CPU, once for all towers, the optimizer takes the sum in the pass that updates.
  void combine() {
    if (update_on_cpu_)
      gradients_->set(gradients_of(replicas_));
    else
      all_reduce_gradients(devices_, replicas_, algorithm_);
  }

  static BatchTotals mean_of(const std::vector<torch::Tensor>& losses, const std::vector<Batch>& shards) {
    BatchMean mean;
    for (std::size_t i = 0; i < losses.size(); ++i)
      if (losses[i].defined()) mean.add(shards[i].size(), losses[i].item<double>());
    return mean.totals();
  }

  Task task_;
  Devices devices_;
  Replicas replicas_;
  Uneven uneven_;
  shm::Algorithm algorithm_;
  bool update_on_cpu_;
  std::shared_ptr<SummedGradients> gradients_;  // with update_on_cpu_
  PhaseTimes phases_;
};

}  // namespace

std::unique_ptr<Strategy> make_towers(const World& world, const Task& task, const StrategyOptions& options) {
  require_one_process(world, options);
  return std::make_unique<Towers>(world, task, options);
}

}  // namespace lockstep
