#include "lockstep/strategy/ddp_strategy.h"

#include <mutex>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/data/sampler.h"
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

std::unique_ptr<Optimizer> make_optimizer(std::vector<torch::Tensor> parameters, const StrategyOptions& options) {
  const std::string& name = options.optimizer;
  if (name == "sgd") return std::make_unique<SGD>(std::move(parameters), options.sgd);
  if (name == "adam") return std::make_unique<Adam>(std::move(parameters), options.adam);
  if (name == "adamw") return std::make_unique<AdamW>(std::move(parameters), options.adamw);
  if (name == "lamb") return std::make_unique<LAMB>(std::move(parameters), options.lamb);
  if (name == "lars") return std::make_unique<LARS>(std::move(parameters), options.lars);
  throw UsageError({.what = concat("no such optimizer: ", name), .next = "sgd, adam, adamw, lamb or lars"});
}

// SplitMix64 (Steele, Lea and Flood, 2014): neighbouring steps and shards get unrelated random numbers.
std::uint64_t mixed(std::uint64_t seed, std::uint64_t number) {
  std::uint64_t z = seed + (number + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// `single` and `ddp`: a replica in every rank. In a world of one there is nothing to exchange, and it is `single`.
class DdpStrategy : public Strategy {
 public:
  DdpStrategy(const World& world, const Task& task, const StrategyOptions& options)
      : world_(world), task_(task), options_(options), model_(make_seeded_model(task, options.seed)) {
    model_->to(world.device());
    layout_ = chosen_layout(options.layout, *model_, world.device());
    set_layout(*model_, layout_);
    optimizer_ = make_optimizer(model_->parameters(), options);
    optimizer_->set_clipping(options.clipping);
    if (options.ema_decay > 0) optimizer_->keep_average(options.ema_decay);
    ddp_ = std::make_unique<DistributedDataParallel>(
        world, *model_, *optimizer_,
        DistributedDataParallelOptions{.share_parameters = options.share_parameters,
                                       .virtual_shards = options.virtual_shards});
    torch::manual_seed(options.seed + static_cast<std::uint64_t>(world.rank()) + 1);  // dropout differs between ranks
  }

  BatchTotals compute(const Batch& batch) override {
    optimizer_->zero_grad();
    if (options_.virtual_shards > 0)
      compute_shards(batch);
    else
      forward_and_backward(batch);
    return ddp_->last_batch();
  }

  void update() override {
    const Stopwatch watch;
    optimizer_->step();
    phases_.update += watch.seconds();
    ++step_;
  }

  void go_on_from(std::int64_t step) override { step_ = step; }

  torch::Tensor forward(const torch::Tensor& data) override { return task_.forward(*model_, in_layout(data, layout_)); }

  torch::nn::Module& model() override { return *model_; }
  Optimizer& optimizer() override { return *optimizer_; }
  void parameters_written() override { ddp_->parameters_written(); }
  const PhaseTimes& phases() const override { return phases_; }

 private:
  // This rank's shards one after another, each with random numbers that depend on nothing but seed, step and shard.
  void compute_shards(const Batch& batch) {
    const torch::Tensor samples = torch::tensor({batch.size()});
    world_.all_reduce(samples);
    const auto all = samples.item<std::int64_t>();
    const int shards = options_.virtual_shards / world_.size();
    const std::int64_t before_mine = even_part(all, world_.rank(), world_.size()).begin;
    for (int shard = world_.rank() * shards; shard < (world_.rank() + 1) * shards; ++shard) {
      const Range part = even_part(all, shard, options_.virtual_shards);
      torch::manual_seed(mixed(mixed(options_.seed, static_cast<std::uint64_t>(step_)), static_cast<std::uint64_t>(shard)));
      forward_and_backward({batch.data.slice(0, part.begin - before_mine, part.end - before_mine),
                            batch.target.slice(0, part.begin - before_mine, part.end - before_mine)});
    }
  }

  void forward_and_backward(const Batch& batch) { backward_and_exchange(forward_and_loss(batch), batch.size()); }

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
  StrategyOptions options_;
  ModulePtr model_;
  Layout layout_ = Layout::kContiguous;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::int64_t step_ = 0;
  PhaseTimes phases_;
};

}  // namespace

std::unique_ptr<Strategy> make_ddp(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<DdpStrategy>(world, task, options);
}

}  // namespace lockstep
