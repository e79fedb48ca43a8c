// SPDX-License-Identifier: Apache-2.0
// The strategy `kvstore` with its local kinds: devices of one process.
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/strategy/kvstore/local_store.h"
#include "lockstep/strategy/kvstore/statistics.h"
#include "lockstep/strategy/kvstore/store_strategy.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep {
namespace {

class LocalStrategy : public StoreStrategy {
 public:
  LocalStrategy(const World& world, const Task& task, const StrategyOptions& options, KVStoreKind kind)
      : StoreStrategy(world, task, options, kind == KVStoreKind::kLocalUpdateCpu),
        store_(kind == KVStoreKind::kLocalAllReduceDevice ? SumOn::kDevice : SumOn::kCpu, devices_.get()),
        statistics_{.store = name_of(kind), .workers = 1} {
    store_.init(trained_parameters(model()));
    if (update_in_store_) {
      store_.set_optimizer(update_options(options));
      share_values();
    }
    seed_steps(options.seed + 1);
  }

  // model() and optimizer() are what a checkpoint keeps: the store's state goes there, and back in restored().
  void synchronise() override {
    if (!update_in_store_) return;
    for (std::size_t i = 0; i < store_.values().size(); ++i)
      optimizer().set_state(parameters_.front()[i], store_.optimizer()->state_of(store_.values()[i]));
  }

  void restored(std::int64_t) override {
    if (!update_in_store_) return follow_first(replicas_);
    for (std::size_t i = 0; i < store_.values().size(); ++i)
      store_.optimizer()->set_state(store_.values()[i], optimizer().state_of(parameters_.front()[i]));
    follow_model(replicas_);
  }

  Report report() const override { return statistics_.report(); }
  std::string table() const override { return statistics_.table(); }

 private:
  Store& store() override { return store_; }

  // Devices are cores: they read the weights where the store updates them, and a pull copies nothing.
  void share_values() {
    for (const auto& device : parameters_)
      for (std::size_t i = 0; i < device.size(); ++i) torch::Tensor(device[i]).set_data(store_.values()[i]);
  }

  BatchTotals over_workers(const BatchTotals& totals) override {
    statistics_.add_gradient(totals.samples, std::ssize(replicas_), /*delay=*/0);
    statistics_.add_update(totals.samples);
    return totals;
  }

  LocalStore store_;
  StoreStatistics statistics_;
};

KVStoreKind kind_of(const World& world, const Task& task, const StrategyOptions& options) {
  if (options.kvstore.kind != KVStoreKind::kLocal) return options.kvstore.kind;
  const auto [kind, reason] =
      choose_local_kind(trained_parameters(*make_replica(task, options).model), options.devices, world.device());
  log_info(concat("kvstore local is ", name_of(kind), ": ", reason));
  return kind;
}

}  // namespace

std::unique_ptr<Strategy> make_local_strategy(const World& world, const Task& task, const StrategyOptions& options) {
  require_one_process(world, options);
  return std::make_unique<LocalStrategy>(world, task, options, kind_of(world, task, options));
}

}  // namespace lockstep
