// SPDX-License-Identifier: Apache-2.0
// The calls of lockstep/towers.h, and the strategy `towers` (docs/strategies/towers.md): data parallel training out of them.
//
// Owns:    the devices' threads, a replica per device
// Threads: one scheduling thread
// Ranks:   inside one process
#include "lockstep/towers.h"

#include <algorithm>

#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

void require_same_structure(const torch::nn::Module& made, const torch::nn::Module& given) {
  for (const auto named_tensors : {named_parameters, named_buffers}) {
    const auto expected = named_tensors(made), found = named_tensors(given);
    const bool same = std::ranges::equal(expected, found, [](const NamedTensor& a, const NamedTensor& b) {
      return a.name == b.name && a.tensor.sizes() == b.tensor.sizes() &&
             a.tensor.scalar_type() == b.tensor.scalar_type();
    });
    require(same,
            concat("get_params() of a ", given.name(), " that is not like the ", made.name(),
                   " that the task makes: names, shapes and dtypes differ"),
            "give a task whose make_model() makes this model");
  }
}

}  // namespace

Replicas get_params(const Devices& devices, const Task& task, const StrategyOptions& options) {
  Replicas replicas;
  for (int i = 0; i < devices.size(); ++i) {
    replicas.push_back(make_replica(task, options, devices.where(i)));
    on_gpus(either_of(devices.where(0), devices.where(i)),
            [&] { copy_model(*replicas.front().model, *replicas.back().model); });
  }
  return replicas;
}

Replicas get_params(const Devices& devices, const Task& task, const torch::nn::Module& model,
                    const StrategyOptions& options) {
  Replicas replicas = get_params(devices, task, options);
  require_same_structure(*replicas.front().model, model);
  for (const Replica& replica : replicas) copy_model(model, *replica.model);
  return replicas;
}

Replicas share_variables(Devices& devices, const Task& task, const StrategyOptions& options) {
  require(!devices.on_gpus(), "shared variables on the CPU with GPUs",
          "take KVStore::create(\"local_update_cpu\"), or a copy on every GPU: get_params()");
  Replicas replicas = get_params(devices, task, options);
  share_parameters(devices, replicas);
  return replicas;
}

void combine_gradients(const Replicas& replicas) {
  const auto& combined = replicas.front().combined;
  if (!combined)
    throw UsageError({.what = "combine_gradients() of replicas with their own variables",
                      .next = "make them with share_variables(), or call all_reduce_gradients() and update()"});
  combined->set(gradients_of(parameters_of(replicas)));
}

std::vector<CombinedGradient> combined_gradients(const Replicas& replicas) {
  const torch::NoGradGuard no_grad;
  const DeviceTensors parameters = parameters_of(replicas), gradients = gradients_of(parameters);
  std::vector<CombinedGradient> combined;
  for (size_t i = 0; i < parameters[0].size(); ++i) {
    Tensor sum;
    for (const auto& of_device : gradients)
      if (of_device[i].defined()) sum = sum.defined() ? sum + of_device[i].to(sum.device()) : of_device[i];
    if (sum.defined()) combined.push_back({sum, parameters[0][i]});
  }
  return combined;
}

void require_even(int64_t samples, const Devices& devices, Uneven uneven) {
  if (uneven == Uneven::kRefuse && samples % devices.size() != 0)
    throw UsageError(
        {.what = concat("a batch of ", samples, " samples does not divide evenly over ", devices.size(), " devices"),
         .next = "leave out --refuse-uneven: an uneven split is exact"});
}

std::vector<Batch> split_and_load(const Batch& batch, const Devices& devices, Uneven uneven) {
  require_even(batch.size(), devices, uneven);
  return receive_parts(start_parts(devices, batch));
}

Tensors split_and_load(const Tensor& data, const Devices& devices, Uneven uneven) {
  Tensors parts;
  for (const Batch& part : split_and_load(Batch{data}, devices, uneven)) parts.push_back(part.data);
  return parts;
}

Tensors tower_losses(Devices& devices, const Task& task, const Replicas& replicas, const std::vector<Batch>& shards,
                     bool clears_gradients) {
  const auto loss = [task](const Replica& replica, const Batch& shard, const Device&) {
    return samples_of(task, shard) > 0 ? task.loss(replica.forward(task, shard), shard) : Tensor();
  };
  return run_replicas(devices, replicas, shards, loss, clears_gradients);
}

void backward(Devices& devices, const Task& task, const Tensors& losses, const std::vector<Batch>& shards,
              int64_t samples) {
  if (samples == 0)
    for (const Batch& shard : shards) samples += samples_of(task, shard);
  devices.run([losses, shards, samples, task](Device& device) {
    const Tensor& loss = for_device(losses, device);
    if (!loss.defined()) return;
    loss.backward(torch::full_like(loss, fraction(samples_of(task, for_device(shards, device)), samples)));
  });
}

// One collective per parameter, in the order of the model. With K bytes in all and N devices, the slowest device
// reads and writes 2K (direct), (N+1)K (central), 4K(N-1)/N in 2(N-1) steps (ring) or 2K log2(N) (tree); what each
// step does is in docs/collectives.md. All devices take part in every collective: with_gradients() gives each of them
// the same list.
void all_reduce_gradients(Devices& devices, const Replicas& replicas, Algorithm algorithm) {
  if (replicas.size() == 1) return;
  devices.run([parameters = with_gradients(parameters_of(replicas)), algorithm](Device& device) {
    for (const Tensor& parameter : for_device(parameters, device)) device.all_reduce(parameter.grad(), algorithm);
  });
}

void all_reduce(Devices& devices, const Tensors& tensors, Algorithm algorithm) {
  require(std::ssize(tensors) == devices.size(),
          concat("all_reduce of ", tensors.size(), " tensors over ", devices.size(), " devices"),
          "give one tensor for each device, on it");
  devices.run([tensors, algorithm](Device& device) {
    const torch::NoGradGuard no_grad;
    device.all_reduce(for_device(tensors, device), algorithm);
  });
}

void update(Devices& devices, const Replicas& replicas) {
  devices.run([replicas](Device& device) { for_device(replicas, device).optimizer->step(); });
}

BatchTotals train_batch(Devices& devices, const Task& task, const Replicas& replicas, const Batch& batch,
                        const TrainBatchOptions& options) {
  const auto shards = split_and_load(batch, devices, options.uneven);
  const auto losses = tower_losses(devices, task, replicas, shards);
  backward(devices, task, losses, shards);
  all_reduce_gradients(devices, replicas, options.algorithm);
  update(devices, replicas);
  return mean_of(losses, shards, task);
}

// ---- The strategy

namespace {

class Towers : public ReplicaStrategy {
 public:
  Towers(const World& world, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(world, task, options), algorithm_(options.algorithm) {
    if (options.towers.update == UpdateOn::kCpu) share_parameters(*devices_, replicas_);
    seed_steps(options.seed);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    const BatchTotals totals = train_towers(batch);
    in_phase(Phase::kExchange, [&] {
      if (update_on_cpu())
        combine_gradients(replicas_);
      else
        all_reduce_gradients(*devices_, replicas_, algorithm_);
    });
    return totals;
  }

  void update() override {
    if (!update_on_cpu()) return update_replicas();
    in_phase(Phase::kUpdate, [&] { optimizer().step(); });
  }

  void restored(int64_t) override { update_on_cpu() ? follow_model(replicas_) : follow_first(replicas_); }

 private:
  bool update_on_cpu() const { return replicas_.front().combined != nullptr; }

  Algorithm algorithm_;
};

}  // namespace

HeldBytes bytes_of_towers(const PlannedRun& run) {
  return run.options.towers.update == UpdateOn::kCpu ? bytes_of_data_parallel(run) : bytes_of_averaging(run);
}

std::unique_ptr<Strategy> make_towers(const World& world, const Task& task, const StrategyOptions& options) {
  require_one_process(world, options);
  if (options.towers.update == UpdateOn::kCpu && !devices_of(options).front().is_cpu()) {
    StrategyOptions in_store = options;  // the same by another name: a store in the host's memory
    in_store.kvstore = {.kind = KVStoreKind::kLocalUpdateCpu};
    return make_kvstore_strategy(world, task, in_store);
  }
  return std::make_unique<Towers>(world, task, options);
}

}  // namespace lockstep
