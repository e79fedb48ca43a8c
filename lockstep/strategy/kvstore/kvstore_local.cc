// The strategy `kvstore` with its local kinds: devices of one process.
#include <map>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/kvstore.h"
#include "lockstep/strategy/kvstore/kvstore_worker.h"
#include "lockstep/strategy/kvstore/server_statistics.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep {
namespace {

class KVStoreLocal : public KVStoreWorker {
 public:
  KVStoreLocal(const World& world, const Task& task, const StrategyOptions& options, KVStoreKind kind)
      : KVStoreWorker(world, task, options, kind == KVStoreKind::kLocalUpdateCpu),
        store_(kind == KVStoreKind::kLocalAllReduceDevice ? SumOn::kDevice : SumOn::kCpu, &threads()),
        statistics_{.store = name_of(kind), .workers = 1} {
    store_.init(trained_parameters(model()));
    if (update_in_store()) {
      store_.set_optimizer(options);
      share_values();
    }
    seed_steps(options.seed + 1);
  }

  void synchronise() override {
    if (!update_in_store()) return;
    for (std::size_t i = 0; i < store_.values().size(); ++i)
      optimizer().set_state(parameters().front()[i], store_.optimizer()->state_of(store_.values()[i]));
  }

  void restored(std::int64_t) override {
    if (!update_in_store()) return follow_first(replicas());
    for (std::size_t i = 0; i < store_.values().size(); ++i)
      store_.optimizer()->set_state(store_.values()[i], optimizer().state_of(parameters().front()[i]));
    follow_model(replicas());
  }

  Report report() const override { return statistics_.report(); }
  std::string table() const override { return statistics_.table(); }

 private:
  KVStore& store() override { return store_; }

  // Devices are cores: they read the weights where the store updates them, and a pull copies nothing.
  void share_values() {
    for (const auto& device : parameters())
      for (std::size_t i = 0; i < device.size(); ++i) torch::Tensor(device[i]).set_data(store_.values()[i]);
  }

  BatchTotals over_workers(const BatchTotals& totals) override {
    statistics_.add_gradient({.samples = totals.samples, .devices = static_cast<std::int64_t>(replicas().size())}, 0);
    statistics_.add_update(totals.samples);
    return totals;
  }

  LocalKVStore store_;
  ServerStatistics statistics_;
};

// `local` makes its choice here.
KVStoreKind kind_of(const World& world, const Task& task, const StrategyOptions& options) {
  if (options.kvstore.kind != KVStoreKind::kLocal) return options.kvstore.kind;
  const auto [kind, reason] =
      choose_local_kind(trained_parameters(*make_replica(task, options).model), options.devices, world.device());
  log_info(concat("kvstore local is ", name_of(kind), ": ", reason));
  return kind;
}

}  // namespace

std::unique_ptr<Strategy> make_local_kvstore(const World& world, const Task& task, const StrategyOptions& options) {
  require_one_process(world, options);
  return std::make_unique<KVStoreLocal>(world, task, options, kind_of(world, task, options));
}

}  // namespace lockstep
