// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/gpu_strategies.h: strategies with simulated GPUs in this process, and with a rank for each GPU, on a
// model whose tensors divide evenly between 2, 3 and 4 devices.
#pragma once

#include <string>
#include <vector>

#include "lockstep/collective/world/world_state.h"
#include "tests/backend_groups.h"
#include "tests/simulated_cuda/four_gpus.h"
#include "tests/strategies.h"

namespace lockstep::testing {

inline constexpr int64_t kWidth = 24, kHidden = 48, kSamples = 12;
inline constexpr int64_t kModelBytes = 8 * (2 * kWidth * kHidden + kHidden + kWidth);

// 24 -> 48 -> 24, float64. Every tensor of it begins a cache line in a flat block.
inline Task even_task() {
  Task task = small_task();
  task.make_model = [] {
    torch::nn::Sequential net(torch::nn::Linear(kWidth, kHidden), torch::nn::Tanh(),
                              torch::nn::Linear(kHidden, kWidth));
    net->to(torch::kFloat64);
    return net.ptr();
  };
  return task;
}

inline Batch even_batch(int64_t samples = kSamples) {
  return {torch::linspace(-1, 1, samples * kWidth, torch::kFloat64).reshape({samples, kWidth}),
          torch::arange(samples) % kWidth};
}

struct GpuArrangement {
  std::string name;
  StrategyOptions options;
};
inline void PrintTo(const GpuArrangement& arrangement, std::ostream* out) { *out << arrangement.name; }

// Whose devices have a replica of the model each.
inline std::vector<GpuArrangement> arrangements_of_replicas() {
  std::vector<GpuArrangement> all;
  const auto add = [&](const std::string& name, StrategyOptions options) {
    options.optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9};
    options.seed = 4;
    all.push_back({name, options});
  };
  add("towers_direct", {.kind = StrategyKind::kTowers});
  add("towers_central", {.kind = StrategyKind::kTowers, .algorithm = Algorithm::kCentral});
  add("towers_ring", {.kind = StrategyKind::kTowers, .algorithm = Algorithm::kRing});
  add("towers_tree", {.kind = StrategyKind::kTowers, .algorithm = Algorithm::kTree});
  add("towers_update_cpu", {.kind = StrategyKind::kTowers, .towers = {.update = UpdateOn::kCpu}});
  add("data_parallel", {.kind = StrategyKind::kDataParallel});
  add("averaging", {.kind = StrategyKind::kAveraging});
  add("kvstore_update_cpu", {.kind = StrategyKind::kKVStore, .kvstore = {.kind = KVStoreKind::kLocalUpdateCpu}});
  add("kvstore_allreduce_cpu", {.kind = StrategyKind::kKVStore, .kvstore = {.kind = KVStoreKind::kLocalAllReduceCpu}});
  add("kvstore_allreduce_device",
      {.kind = StrategyKind::kKVStore, .kvstore = {.kind = KVStoreKind::kLocalAllReduceDevice}});
  return all;
}

inline std::vector<GpuArrangement> arrangements_in_one_process() {
  auto all = arrangements_of_replicas();
  all.push_back(
      {"pipeline", {.kind = StrategyKind::kPipeline, .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9}, .seed = 4}});
  return all;
}

inline std::unique_ptr<Strategy> strategy_on_gpus(StrategyOptions options, int devices,
                                                  const Task& task = even_task()) {
  options.devices = devices;
  options.places = even_places(torch::kCUDA, devices);
  return make_strategy(World::single(), task, options);
}

inline double train_step(Strategy& strategy, const Batch& batch = even_batch()) {
  const double loss = strategy.forward_backward(batch).mean_loss;
  strategy.update();
  return loss;
}

// Runs `body` once per rank, each rank a thread with a GPU of its own.
inline void run_ranks_on_gpus(int ranks, const std::function<void(World&)>& body) {
  backend::run_threads(ranks, [&](int rank, const backend::StorePtr& store) {
    World world = WorldState::over_store(store, rank, ranks, {.device = torch::kCUDA});
    body(world);
    world.barrier();
  });
}

}  // namespace lockstep::testing
