#include "lockstep/strategy/ddp_strategy.h"

#include <mutex>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/strategy/ddp.h"

namespace lockstep {
namespace {

// Ranks that are threads share torch's generator: nobody else draws from it between the seed and the last parameter.
ModulePtr make_seeded_model(const Task& task, std::uint64_t seed) {
  static std::mutex generator_in_use;
  const std::lock_guard lock(generator_in_use);
  torch::manual_seed(seed);
  return task.make_model();
}

Layout chosen_layout(const std::string& name, const torch::nn::Module& model, torch::Device device) {
  if (name == "auto") return preferred_layout(model, device);
  if (name == "contiguous") return Layout::kContiguous;
  if (name == "channels_last") return Layout::kChannelsLast;
  throw UsageError({.what = concat("no such layout: ", name), .next = "auto, contiguous or channels_last"});
}

std::unique_ptr<Optimizer> make_optimizer(const torch::nn::Module& model, const StrategyOptions& options) {
  if (options.optimizer == "sgd") return std::make_unique<SGD>(model.parameters(), options.sgd);
  if (options.optimizer == "adamw") return std::make_unique<AdamW>(model.parameters(), options.adamw);
  throw UsageError({.what = concat("no such optimizer: ", options.optimizer), .next = "sgd or adamw"});
}

// `single` and `ddp`: a replica in every rank. In a world of one there is nothing to exchange, and it is `single`.
class DdpStrategy : public Strategy {
 public:
  DdpStrategy(const World& world, const Task& task, const StrategyOptions& options)
      : world_(world), task_(task), model_(make_seeded_model(task, options.seed)) {
    model_->to(world.device());
    layout_ = chosen_layout(options.layout, *model_, world.device());
    set_layout(*model_, layout_);
    optimizer_ = make_optimizer(*model_, options);
    ddp_ = std::make_unique<DistributedDataParallel>(world, *model_, *optimizer_);
    torch::manual_seed(options.seed + static_cast<std::uint64_t>(world.rank()) + 1);  // dropout differs between ranks
  }

  BatchTotals compute(const Batch& batch) override {
    optimizer_->zero_grad();
    const torch::Tensor loss = forward_and_loss(batch);
    backward_and_exchange(loss, batch.size());
    return ddp_->last_batch();
  }

  void update() override {
    const Stopwatch watch;
    optimizer_->step();
    phases_.update += watch.seconds();
  }

  torch::Tensor forward(const torch::Tensor& data) override { return task_.forward(*model_, in_layout(data, layout_)); }

  torch::nn::Module& model() override { return *model_; }
  Optimizer& optimizer() override { return *optimizer_; }
  void parameters_written() override { ddp_->parameters_written(); }
  const PhaseTimes& phases() const override { return phases_; }

 private:
  torch::Tensor forward_and_loss(const Batch& batch) {
    if (batch.size() == 0) return {};
    const Stopwatch watch;
    require_device(batch.data, world_.device(), "the batch");
    const torch::Tensor loss = task_.loss(forward(batch.data), batch.target);
    phases_.forward += watch.seconds();
    return loss;
  }

  void backward_and_exchange(const torch::Tensor& loss, std::int64_t samples) {
    const Stopwatch watch;
    ddp_->backward(loss, samples);
    phases_.backward += watch.seconds() - ddp_->exchange_seconds();
    phases_.exchange += ddp_->exchange_seconds();
  }

  World world_;
  Task task_;
  ModulePtr model_;
  Layout layout_ = Layout::kContiguous;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  PhaseTimes phases_;
};

}  // namespace

std::unique_ptr<Strategy> make_ddp(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<DdpStrategy>(world, task, options);
}

}  // namespace lockstep
