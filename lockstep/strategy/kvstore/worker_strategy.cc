// SPDX-License-Identifier: Apache-2.0
// The strategy `kvstore` with servers: a worker.
#include <algorithm>

#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/kvstore/client.h"
#include "lockstep/strategy/kvstore/store_strategy.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

class WorkerStrategy : public StoreStrategy {
 public:
  WorkerStrategy(const DistSetting& setting, const World& workers, const Task& task)
      : StoreStrategy(setting.world, task, setting.options, setting.options.kvstore.update_on_kvstore),
        setting_(setting),
        workers_(workers),
        store_(setting, devices_.get()) {
    setting_.share_model(model());
    follow_model(replicas_);
    store_.init(trained_parameters(model()), named_buffers(model()));
    if (update_in_store_) store_.set_optimizer(update_options(setting.options));
    seed_steps(setting.options.seed + static_cast<std::uint64_t>(workers.rank()) + 1);
  }

  void synchronise() override {
    if (!setting_.in_step()) return;
    setting_.broadcast_model(model(), update_in_store_ ? 0 : setting_.workers.front());
    if (update_in_store_ || workers_.rank() > 0) return;
    TensorSender sender(setting_.world, 0, /*tag=*/0);
    for (const torch::Tensor& parameter : parameters_.front()) sender.send(message_of(optimizer().state_of(parameter)));
    sender.finish();
  }

  void restored(std::int64_t) override {
    follow_first(replicas_);
    has_weights_ = false;
    setting_.world.barrier();  // the servers have theirs
  }

  World data_world(const World&) const override { return workers_; }
  World loop_world(const World& world) const override { return setting_.loop_world(world); }

  Report report() const override {
    return {{"pushed_bytes", static_cast<double>(store_.bytes_pushed())},
            {"pulled_bytes", static_cast<double>(store_.bytes_pulled())}};
  }

 private:
  Store& store() override { return store_; }

  // Not in the constructor: with dist_bounded it may have to wait for other workers' first steps.
  void before_step() override {
    if (update_in_store_ && !has_weights_) pull_weights();
    has_weights_ = true;
  }

  // One all_reduce of a few numbers: samples, their loss and, where workers update, for each parameter whether this
  // worker has a gradient of it.
  BatchTotals over_workers(const BatchTotals& own) override {
    if (!setting_.in_step()) return own;
    const auto samples = static_cast<double>(own.samples);
    std::vector<double> values{samples, own.mean_loss * samples};
    if (!update_in_store_)
      for (std::size_t i = 0; i < trained_keys().size(); ++i) values.push_back(has_gradient(i) ? 1 : 0);
    const torch::Tensor sums = torch::tensor(values, torch::kFloat64);
    try {
      workers_.all_reduce(sums);
    } catch (const PeerLost& error) {
      store_.abandon(error.text().what);
      throw;
    }
    const auto* sum = sums.const_data_ptr<double>();
    with_gradient_.assign(sum + 2, sum + sums.numel());
    return {.samples = static_cast<std::int64_t>(sum[0]), .mean_loss = sum[1] / sum[0]};
  }

  bool has_gradient(std::size_t parameter) const {
    return std::ranges::any_of(parameters_, [&](const auto& device) { return device[parameter].grad().defined(); });
  }

  // Where workers update, a parameter that only others have a gradient of needs one here, too: the mean is pulled into
  // it. The buffers that are pushed are the first device's.
  void before_push(const PushOptions& options) override {
    for (std::size_t i = 0; i < with_gradient_.size(); ++i) {
      torch::Tensor parameter = parameters_.front()[i];
      if (with_gradient_[i] > 0 && !parameter.grad().defined())
        parameter.mutable_grad() = torch::zeros_like(parameter).detach();
    }
    if (buffer_keys().size() > 0) store_.push(buffer_keys(), {buffers_.front()}, options);
  }

  DistSetting setting_;
  World workers_;
  bool has_weights_ = false;
  std::vector<double> with_gradient_;  // [parameter] on how many workers; empty where servers update
  StoreClient store_;
};

}  // namespace

std::unique_ptr<Strategy> make_worker_strategy(const DistSetting& setting, const World& workers, const Task& task) {
  return std::make_unique<WorkerStrategy>(setting, workers, task);
}

}  // namespace lockstep
