// SPDX-License-Identifier: Apache-2.0
// The strategy `kvstore`: a store of weights that devices push gradients to and pull weights from. lockstep/kvstore.h
// lists its kinds; `local` picks one of the local ones, and logs which and why.
//
// Flow:    Batch -> towers.h -> Store -> the devices' replicas
// Owns:    the devices' threads, a replica per device, the store
// Ranks:   all ranks call
//
// dist_*: servers and workers go through the same training loop. A worker trains on its part of the batches. A server's
// threads serve; its loop counts a step once every worker has pushed it, validates and saves.
#include <algorithm>
#include <limits>

#include "lockstep/base/log.h"
#include "lockstep/base/process/stop.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/kvstore/local_store.h"
#include "lockstep/strategy/kvstore/server.h"
#include "lockstep/strategy/option_names.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

void check(const StrategyOptions& options) {
  const KVStoreOptions& store = options.kvstore;
  const CompressionOptions& compression = options.compression;
  const std::string kind = name_of(store.kind);
  const bool exact = compression.kind == Compression::kNone;
  require(exact || (compression.kind == Compression::kTwoBit && has_servers(store.kind)),
          concat("--compression ", name_of(compression.kind), " with kvstore ", kind),
          "none, or 2bit with a dist_ kvstore");
  require(exact || compression.amount >= 0, "a negative --compression-amount", "give the threshold, such as 0.5");
  require(store.update_on_kvstore || !goes_on_without_workers(store.kind),
          concat("kvstore ", kind, " updates on its servers"),
          "leave out --update-on-kvstore false, or choose dist_sync");
  require(store.staleness >= 0, concat("--staleness ", store.staleness), "give updates, 0 or more");
  require(store.split_above > 0, concat("--split-above ", store.split_above), "give elements, such as 1000000");
}

// One training step over a store, the same for every kind:
//
//   forward_backward  each device: forward and backward for its part of the batch, as towers do
//   update            push the gradients, then pull the weights (the store has updated them)
//                                              or the merged gradients (every device updates)
class StoreStrategy : public ReplicaStrategy {
 public:
  BatchTotals forward_backward(const Batch& batch) override {
    before_step();
    last_ = train_towers(batch);
    return over_workers(last_);
  }

  // A key has a gradient on every device, or on none.
  void update() override {
    in_phase(Phase::kExchange, [&] {
      const PushOptions options{.samples = last_.samples,
                                .loss = last_.mean_loss,
                                .learning_rate = learning_rate(),
                                .examples = last_.examples};
      before_push(options);
      static_cast<void>(with_gradients(parameters_));
      const DeviceTensors gradients = gradients_of(parameters_);
      store_->push_pull(trained_keys(), gradients, update_in_store_ ? parameters_ : gradients, options);
      if (update_in_store_) pull_buffers();
    });
    if (!update_in_store_) update_replicas();
  }

 protected:
  StoreStrategy(const World& world, const Task& task, const StrategyOptions& options, bool update_in_store)
      : ReplicaStrategy(world, task, options), update_in_store_(update_in_store) {
    for (const Replica& replica : replicas_) {
      parameters_.push_back(tensors_of(trainable(named_parameters(*replica.model))));
      buffers_.push_back(tensors_of(named_buffers(*replica.model)));
    }
  }

  virtual BatchTotals over_workers(const BatchTotals& own) = 0;  // of the global batch
  virtual void before_step() {}                                  // the weights are about to be used
  virtual void before_push(const PushOptions& /*options*/) {}

  KeyRange trained_keys() const { return {0, parameters_.front().size()}; }
  KeyRange buffer_keys() const { return {trained_keys().last, store_->keys().size()}; }  // none in a local store
  void pull_buffers() {
    if (buffer_keys().size() > 0) store_->pull(buffer_keys(), buffers_);
  }

  DeviceTensors parameters_;  // those that are trained
  DeviceTensors buffers_;
  std::unique_ptr<Store> store_;
  bool update_in_store_;

 private:
  BatchTotals last_;  // of this worker
};

// ---- Local kinds

class LocalStrategy : public StoreStrategy {
 public:
  LocalStrategy(const World& world, const Task& task, const StrategyOptions& options, KVStoreKind kind)
      : StoreStrategy(world, task, options, kind == KVStoreKind::kLocalUpdateCpu),
        statistics_{.store = name_of(kind), .workers = 1} {
    auto store = std::make_unique<LocalStore>(kind, devices_.get());
    local_ = store.get();
    store_ = std::move(store);
    store_->init(trainable(named_parameters(model())));
    if (update_in_store_) {
      store_->set_optimizer(update_options(options));
      if (!devices_->on_gpus()) share_values();
    }
    seed_steps(options.seed);
  }

  // model() and optimizer() are what a checkpoint keeps: the store's state goes there, and back in restored().
  void synchronise() override {
    if (!update_in_store_) return;
    for (size_t i = 0; i < local_->values().size(); ++i)
      optimizer().set_state(parameters_.front()[i], local_->optimizer()->state_of(local_->values()[i]));
  }

  void restored(int64_t) override {
    if (!update_in_store_) return follow_first(replicas_);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < local_->values().size(); ++i) {
      const Tensor &value = local_->values()[i], &parameter = parameters_.front()[i];
      if (!value.is_alias_of(parameter)) value.copy_(parameter);
      local_->optimizer()->set_state(value, optimizer().state_of(parameter));
    }
    follow_model(replicas_);
  }

  Report report() const override {
    StoreStatistics all = statistics_;
    all.pushed_bytes = store_->bytes_pushed();
    all.pulled_bytes = store_->bytes_pulled();
    return all.report();
  }
  std::string table() const override { return statistics_.table(); }

 private:
  // Devices are cores: they read the weights where the store updates them, and a pull copies nothing.
  void share_values() {
    for (const auto& device : parameters_)
      for (size_t i = 0; i < device.size(); ++i) Tensor(device[i]).set_data(local_->values()[i]);
  }

  BatchTotals over_workers(const BatchTotals& totals) override {
    statistics_.add_gradient(totals.examples, std::ssize(replicas_), /*delay=*/0);
    statistics_.add_update(totals.examples);
    return totals;
  }

  LocalStore* local_;  // store_
  StoreStatistics statistics_;
};

// ---- dist_*: a worker

class WorkerStrategy : public StoreStrategy {
 public:
  WorkerStrategy(const DistSetting& setting, const World& workers, const Task& task)
      : StoreStrategy(setting.world, task, setting.options, setting.options.kvstore.update_on_kvstore),
        setting_(setting),
        workers_(workers) {
    store_ = make_kv_worker(setting, devices_.get());
    setting_.share_model(model());
    follow_model(replicas_);
    store_->init(trainable(named_parameters(model())), named_buffers(model()));
    if (update_in_store_) store_->set_optimizer(update_options(setting.options));
    seed_steps(setting.options.seed, workers.rank());
  }

  void synchronise() override {
    if (!setting_.in_step()) return;
    broadcast_model(setting_.world, model(), update_in_store_ ? 0 : setting_.workers.front());
    if (update_in_store_ || workers_.rank() > 0) return;
    TensorSender sender(setting_.world, 0, /*tag=*/0);
    for (const Tensor& parameter : parameters_.front()) {
      auto state = optimizer().state_of(parameter);
      for (auto& [name, tensor] : state) tensor = tensor.cpu();
      sender.send(message_of(state));
    }
    sender.finish();
  }

  void restored(int64_t) override {
    follow_first(replicas_);
    has_weights_ = false;
    setting_.world.barrier();  // the servers have theirs
  }

  StrategyRanks ranks(const World& world) const override {
    return {.data = workers_, .validation = world, .step = setting_.loop_world(world)};
  }

  Report report() const override {
    return {{"pushed_bytes", store_->bytes_pushed()}, {"pulled_bytes", store_->bytes_pulled()}};
  }

 private:
  // Pulls the first weights. The constructor cannot: with dist_bounded that may wait for other workers' first steps.
  void before_step() override {
    if (update_in_store_ && !has_weights_) {
      store_->pull(trained_keys(), parameters_);
      pull_buffers();
    }
    has_weights_ = true;
  }

  // Adds up the batch over the workers; if they update, they also count who has a gradient of each parameter.
  BatchTotals over_workers(const BatchTotals& own) override {
    if (!setting_.in_step()) {  // each worker stops at its own step
      if (wants_to_stop()) agree_to_stop();
      return own;
    }
    with_gradient_.clear();
    for (size_t i = 0; !update_in_store_ && i < trained_keys().size(); ++i)
      with_gradient_.push_back(has_gradient(i) ? 1 : 0);
    try {
      return sum_totals(workers_, own, &with_gradient_);
    } catch (const PeerLost& error) {
      setting_.abandon(error.text().what);
      throw;
    }
  }

  bool has_gradient(size_t parameter) const {
    return std::ranges::any_of(parameters_, [&](const auto& device) { return device[parameter].grad().defined(); });
  }

  // Makes gradients for parameters that only other workers have one of, where workers update: the mean is pulled into them. Pushes
  // the first device's buffers.
  void before_push(const PushOptions& options) override {
    for (size_t i = 0; i < with_gradient_.size(); ++i) {
      Tensor parameter = parameters_.front()[i];
      if (with_gradient_[i] > 0 && !parameter.grad().defined())
        parameter.mutable_grad() = torch::zeros_like(parameter).detach();
    }
    if (buffer_keys().size() > 0) store_->push(buffer_keys(), {buffers_.front()}, options);
  }

  DistSetting setting_;
  World workers_;
  bool has_weights_ = false;
  std::vector<double> with_gradient_;  // [parameter] on how many workers; empty where servers update
};

// Returns whether some worker's devices are GPUs.
bool any_on_gpus(const World& world, const StrategyOptions& options) {
  const auto where = devices_of(options);
  return sum_over(world, int64_t{!where.empty() && !where.front().is_cpu()}) > 0;
}

KVStoreKind local_kind(const Task& task, const StrategyOptions& options) {
  if (options.kvstore.kind != KVStoreKind::kLocal) return options.kvstore.kind;
  const Replica replica = make_replica(task, options);
  const auto where = devices_of(options);
  const auto separate = where.front().is_cpu() ? std::nullopt : std::optional(not_linked(where));
  const auto [kind, reason] = choose_local_kind(trainable(named_parameters(*replica.model)), options.devices, separate);
  log_info(concat("kvstore local is ", name_of(kind), ": ", reason));
  return kind;
}

}  // namespace

// A worker has the parameters three times: the model, and what it sends and receives. The servers have them as often,
// and two more for each worker; they are on the machines in turn. Unless workers go in step, each has a state of its
// own.
HeldBytes bytes_of_kvstore(const PlannedRun& run) {
  const KVStoreOptions& store = run.options.kvstore;
  if (!has_servers(store.kind)) return bytes_of_data_parallel(run);
  const double devices = run.devices, machines = run.machines, workers = machines * devices;
  const double states = store.kind == KVStoreKind::kDistSync ? 1 : workers;
  return {.processes = (devices + store.servers / machines) * run.process,
          .parameters = (3 * devices + (3 + 2 * workers) / machines) * run.parameters,
          .state = states * run.state / machines,
          .gradients = devices * run.parameters,
          .activations = run.activations};
}

// A layerwise rule takes norms over whole keys, which a server that has only a part of a key does not know.
std::unique_ptr<Strategy> make_kvstore_strategy(const World& world, const Task& task, const StrategyOptions& options) {
  check(options);
  if (!has_servers(options.kvstore.kind)) {
    require_one_process(world, options);
    return std::make_unique<LocalStrategy>(world, task, options, local_kind(task, options));
  }
  StrategyOptions known = options;
  if (layerwise(options.optimizer)) known.kvstore.split_above = std::numeric_limits<int64_t>::max();
  if (!known.layout && any_on_gpus(world, options)) known.layout = Layout::kContiguous;  // as GPUs prefer; servers, too
  const DistSetting setting = connect_store(world, known);
  if (setting.serves()) return make_server_strategy(setting, task);
  return std::make_unique<WorkerStrategy>(setting, *setting.alike, task);
}

// A server by itself has no checkpoints to make: it has nothing to ask of the other servers.
std::unique_ptr<KVStore> KVStore::create(const World& world, const StrategyOptions& options, Devices* devices) {
  check(options);
  if (!has_servers(options.kvstore.kind)) {
    require(world.size() == 1, concat("kvstore ", name_of(options.kvstore.kind), " among ", world.size(), " ranks"),
            "one rank, or a dist_ kvstore");
    return std::make_unique<LocalStore>(options.kvstore.kind, devices);
  }
  const DistSetting setting = connect_store(world, options);
  if (!setting.serves()) return make_kv_worker(setting, devices);
  say_goodbye(setting.to_servers);
  make_kv_server(setting)->wait_for_goodbyes();
  return nullptr;
}

std::unique_ptr<KVStore> KVStore::create(const std::string& kind, std::optional<World> world, Devices* devices) {
  StrategyOptions options;
  options.kvstore.kind = value_named<KVStoreKind>(kind, "kvstore");
  if (!world) world = has_servers(options.kvstore.kind) ? World::from_env() : World::single();
  return create(*world, options, devices);
}

}  // namespace lockstep
