#include <algorithm>

#include "lockstep/error.h"
#include "lockstep/kvstore.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/kvstore/kvstore_dist.h"
#include "lockstep/strategy/kvstore/kvstore_worker.h"
#include "lockstep/strategy/kvstore/slice_state.h"

namespace lockstep {
namespace {

// Of two-bit compression; 0: none.
double threshold_of(const CompressionOptions& compression) {
  if (compression.kind != Compression::kTwoBit) return 0;
  return compression.amount == 0 ? 0.5 : compression.amount;
}

DistKVStoreOptions store_options(const DistSetting& setting, const StrategyOptions& options) {
  return {.consistency = setting.consistency,
          .worker = setting.roles.worker_of(setting.world.rank()),
          // The norms of a layerwise rule are of whole keys.
          .split_above =
              layerwise(options.optimizer) ? std::numeric_limits<std::int64_t>::max() : options.kvstore.split_above,
          .threshold = threshold_of(options.compression)};
}

class KVStoreDistWorker : public KVStoreWorker {
 public:
  KVStoreDistWorker(const DistSetting& setting, std::vector<Link> servers, const World& workers, const Task& task,
                    const StrategyOptions& options)
      : KVStoreWorker(setting.world, task, options, setting.update_in_store),
        setting_(setting),
        workers_(workers),
        store_(store_options(setting, options), std::move(servers), &threads()) {
    require_same_model(setting.world, named_parameters(model()));
    broadcast_model(setting.world, model(), setting.first_worker());
    follow_model(replicas());
    store_.init(trained_parameters(model()), named_buffers(model()));
    if (update_in_store()) store_.set_optimizer(options);
    seed_steps(options.seed + static_cast<std::uint64_t>(workers.rank()) + 1);
  }

  void synchronise() override {
    if (!setting_.in_step()) return;
    broadcast_model(setting_.world, model(), update_in_store() ? 0 : setting_.first_worker());
    if (!update_in_store() && workers_.rank() == 0)
      for (const torch::Tensor& parameter : parameters().front())
        send_state(setting_.world, 0, {.value = parameter, .state = optimizer().state_of(parameter)});
  }

  void restored(std::int64_t) override {
    follow_first(replicas());
    has_weights_ = false;
    setting_.world.barrier();  // the servers have theirs
  }

  World data_world(const World&) const override { return workers_; }
  World loop_world(const World& world) const override { return setting_.in_step() ? world : World::single(); }

  Report report() const override {
    return {{"pushed_bytes", static_cast<double>(store_.bytes_pushed())},
            {"pulled_bytes", static_cast<double>(store_.bytes_pulled())}};
  }

 private:
  KVStore& store() override { return store_; }

  // Not in the constructor: with dist_bounded it may have to wait for other workers' first steps.
  void before_step() override {
    if (update_in_store() && !has_weights_) pull_weights();
    has_weights_ = true;
  }

  // Where workers update, also: on how many of them each parameter has a gradient.
  BatchTotals over_workers(const BatchTotals& own) override {
    if (!setting_.in_step()) return own;
    const auto samples = static_cast<double>(own.samples);
    std::vector<double> values{samples, own.mean_loss * samples};
    if (!update_in_store())
      for (std::size_t i = 0; i < parameters().front().size(); ++i) values.push_back(has_gradient(i) ? 1 : 0);
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
    return std::ranges::any_of(parameters(), [&](const auto& device) { return device[parameter].grad().defined(); });
  }

  void push_buffers(const PushOptions& options) override {
    const std::vector<torch::Tensor> buffers = buffers_of_first_device();
    if (buffers.empty()) return;
    const auto all = static_cast<std::int64_t>(store_.keys().size());
    store_.push(KeyRange{trained_keys().last, all}, {buffers}, options);
  }

  std::vector<torch::Tensor> buffers_of_first_device() {
    std::vector<torch::Tensor> buffers;
    for (const auto& [name, buffer] : named_buffers(model())) buffers.push_back(buffer);
    return buffers;
  }

  // Where workers update, each needs a place for what others have.
  DeviceTensors gradients() override {
    for (std::size_t i = 0; i < with_gradient_.size(); ++i) {
      torch::Tensor parameter = parameters().front()[i];
      if (with_gradient_[i] > 0 && !parameter.grad().defined())
        parameter.mutable_grad() = torch::zeros_like(parameter).detach();
    }
    return KVStoreWorker::gradients();
  }

  DistSetting setting_;
  World workers_;
  bool has_weights_ = false;
  std::vector<double> with_gradient_;  // on how many workers, parameter by parameter; empty: the servers know
  DistKVStore store_;
};

}  // namespace

void broadcast_model(const World& world, const torch::nn::Module& model, int root) {
  broadcast_tensors(world, named_parameters(model), root);
  broadcast_tensors(world, named_buffers(model), root);
}

std::unique_ptr<Strategy> make_kvstore_worker(const DistSetting& setting, std::vector<Link> servers,
                                              const World& workers, const Task& task, const StrategyOptions& options) {
  return std::make_unique<KVStoreDistWorker>(setting, std::move(servers), workers, task, options);
}

}  // namespace lockstep
