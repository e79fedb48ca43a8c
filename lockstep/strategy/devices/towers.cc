// SPDX-License-Identifier: Apache-2.0
#include "lockstep/towers.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {

Replicas get_params(const Devices& devices, const Task& task, const StrategyOptions& options) {
  std::vector<torch::Device> where;
  for (int i = 0; i < devices.size(); ++i) where.push_back(devices.where(i));
  return make_replicas(where, task, options);
}

void require_even(const Batch& batch, const Devices& devices, Uneven uneven) {
  if (uneven == Uneven::kRefuse && batch.size() % devices.size() != 0)
    throw UsageError({.what = concat("a batch of ", batch.size(), " samples does not divide evenly over ",
                                     devices.size(), " devices"),
                      .likely = "the last batch of an epoch, or a --batch-size that is no multiple of the devices",
                      .next = "leave out --refuse-uneven: an uneven split is exact"});
}

std::vector<Batch> split_and_load(const Batch& batch, const Devices& devices, Uneven uneven) {
  require_even(batch, devices, uneven);
  return receive_parts(start_parts(devices, batch));
}

std::vector<torch::Tensor> tower_losses(Devices& devices, const Task& task, const Replicas& replicas,
                                        const std::vector<Batch>& shards) {
  return run_replicas(devices, replicas, shards, [task](const Replica& replica, const Batch& shard) {
    return task.loss(replica.forward(task, shard.data), shard.target);
  });
}

void backward(Devices& devices, const std::vector<torch::Tensor>& losses, const std::vector<Batch>& shards) {
  std::int64_t samples = 0;
  for (const Batch& shard : shards) samples += shard.size();
  devices.run([losses, shards, samples](Device& device) {
    const torch::Tensor& loss = for_device(losses, device);
    if (!loss.defined()) return;
    const auto mine = static_cast<double>(for_device(shards, device).size());
    loss.backward(torch::full_like(loss, mine / static_cast<double>(samples)));
  });
}

// One collective per parameter, in the order of the model. With K bytes in all and N devices, the slowest device
// reads and writes 2K (direct), (N+1)K (central), 4K(N-1)/N in 2(N-1) steps (ring) or 2K log2(N) (tree); what each
// step does is in docs/collectives.md. All devices take part in every collective: with_gradients() gives each of them
// the same list.
void all_reduce_gradients(Devices& devices, const Replicas& replicas, Algorithm algorithm) {
  if (replicas.size() == 1) return;
  devices.run([parameters = with_gradients(replicas), algorithm](Device& device) {
    for (const torch::Tensor& parameter : for_device(parameters, device))
      device.all_reduce(parameter.grad(), algorithm);
  });
}

void update(Devices& devices, const Replicas& replicas) {
  devices.run([replicas](Device& device) { for_device(replicas, device).optimizer->step(); });
}

}  // namespace lockstep
