// SPDX-License-Identifier: Apache-2.0
#include "lockstep/run.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "lockstep/base/command_line.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_transport.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"
#include "lockstep/launch/environment.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/memory.h"
#include "lockstep/models.h"
#include "lockstep/strategy/kvstore/kvstore_strategy.h"
#include "lockstep/train/builtin.h"
#include "lockstep/train/end_process.h"
#include "lockstep/train/loop.h"
#include "lockstep/train/options.h"

namespace lockstep {
namespace {

using MakeTask = std::function<Task(const TrainOptions&)>;

// --device, or a GPU for every rank of this machine if it has as many, else the CPU for all.
torch::DeviceType chosen_device(const TrainOptions& options, int local_size) {
  return options.device.value_or(cuda_device_count() >= local_size ? torch::kCUDA : torch::kCPU);
}

// --threads, else what OMP_NUM_THREADS says (a launcher's doing), else a thread for each of this rank's cores.
void use_threads(const TrainOptions& options, const World& world, const JobEnvironment& job) {
  const char* told = std::getenv("OMP_NUM_THREADS");
  int threads = options.threads;
  if (threads == 0 && options.strategy.ddp.virtual_shards > 0)
    threads = 1;  // the same in every arrangement: more change the bits
  if (threads == 0 && (told == nullptr || !parse_int(told, threads) || threads <= 0))
    threads = threads_of(job, world.cores());
  at::set_num_threads(threads);
}

// The ranks that are servers, beside the workers that --ranks counts.
int server_count(const TrainOptions& options) {
  const StrategyOptions& strategy = options.strategy;
  const bool servers = strategy.kind == StrategyKind::kKVStore && has_servers(strategy.kvstore.kind);
  return servers ? strategy.kvstore.servers : 0;
}

// --devices-per-worker of a worker: 0 if it is not given.
int devices_of_worker(const TrainOptions& options, int worker) {
  const auto& devices = options.devices_per_worker;
  if (devices.empty()) return 0;
  if (devices.size() == 1) return devices.front();
  if (worker < std::ssize(devices)) return *std::next(devices.begin(), worker);
  throw UsageError(
      {.what = concat("--devices-per-worker has ", devices.size(), " numbers, but there is a worker ", worker),
       .next = "give one number for all workers, or one for each"});
}

// "auto" is the number of cores that this process may keep busy.
int rank_count(const TrainOptions& options) {
  if (options.ranks == "auto") return allotted_cores();
  int ranks = 0;
  if (parse_int(options.ranks, ranks) && ranks > 0) return ranks;
  throw UsageError({.what = concat("--ranks ", options.ranks, " is not a number of ranks"),
                    .next = "give a positive number, or auto for one per core"});
}

// Where devices are threads of one process, --ranks counts them.
bool ranks_are_devices(const TrainOptions& options) {
  return strategy_info(options.strategy.kind).threads && options.devices_per_worker.empty() &&
         server_count(options) == 0;
}

// The first ranks of each machine that the launcher started as servers, or the first of all.
bool is_server(const TrainOptions& options, const JobEnvironment& job) {
  if (job.local_servers > 0) return job.local_rank < job.local_servers;
  return job.rank < server_count(options);
}

// A worker's number where the servers are the first ranks of its machine, or of all.
int worker_number(const TrainOptions& options, const JobEnvironment& job) {
  if (job.local_servers == 0) return job.rank - server_count(options);
  return job.rank - (job.node_rank + 1) * job.local_servers;
}

int devices_of_rank(const TrainOptions& options, const JobEnvironment& job) {
  if (!strategy_info(options.strategy.kind).threads || is_server(options, job)) return 1;
  if (ranks_are_devices(options)) return job.launcher == "none" ? rank_count(options) : 1;
  return std::max(1, devices_of_worker(options, worker_number(options, job)));
}

int ranks_to_start(const TrainOptions& options) {
  return ranks_are_devices(options) ? 1 : server_count(options) + rank_count(options);
}

// With what depends on this rank.
StrategyOptions strategy_options(const TrainOptions& options, const JobEnvironment& job) {
  StrategyOptions strategy = options.strategy;
  strategy.devices = devices_of_rank(options, job);
  strategy.kvstore.serves = is_server(options, job);
  return strategy;
}

// One rank, from its first connection to its last step.
int train_rank(const TrainOptions& options, const MakeTask& make_task) {
  keep_freed_memory();
  const Task task = make_task(options);
  const Datasets datasets = load_datasets(options.source, task);
  const JobEnvironment job = read_job_environment();
  const World world =
      World::from_env({.device = chosen_device(options, job.local_size), .timeout = options.strategy.timeout});
  use_threads(options, world, job);
  const auto strategy = make_strategy(world, task, strategy_options(options, job));
  TrainingLoop(world, task, datasets, *strategy, options).run();
  return 0;
}

int start_ranks(const TrainOptions& options, const MakeTask& make_task) {
  const int servers = server_count(options);
  const LaunchOptions launching{
      .ranks = ranks_to_start(options),
      .servers = servers,
      .workers_may_fail = servers > 0 && goes_on_without_workers(options.strategy.kvstore.kind),
      .threads_per_rank = options.threads,
      .output = RankOutput::kFirst};
  const LaunchResult result = launch(launching, [&] { return train_rank(options, make_task); });
  if (result.failure) std::cerr << describe(*result.failure, launching) << std::endl;
  return result.exit_code;
}

// That share a global batch.
int devices_in_all(const TrainOptions& options, int ranks) {
  if (!strategy_info(options.strategy.kind).threads) return ranks;
  if (ranks_are_devices(options)) return ranks == 1 ? rank_count(options) : ranks;
  int devices = 0;
  for (int worker = 0; worker < ranks - server_count(options); ++worker)
    devices += std::max(1, devices_of_worker(options, worker));
  return devices;
}

// What every rank would complain about is said once, before any is started.
void check_before_start(const TrainOptions& options, const MakeTask& make_task, int ranks) {
  static_cast<void>(make_task(options));
  require_batch_for_ranks(options.loader.batch_size, devices_in_all(options, ranks));
  if (!options.checkpoint_dir.empty()) CheckpointFolder{options.checkpoint_dir};
}

int run_parsed(const TrainOptions& options, const MakeTask& make_task) {
  const JobEnvironment job = read_job_environment();
  if (job.rank == 0) check_options(options);
  const bool start_here = job.launcher == "none" && ranks_to_start(options) > 1;
  if (start_here || job.rank == 0)
    check_before_start(options, make_task, start_here ? ranks_to_start(options) : job.world_size);
  return start_here ? start_ranks(options, make_task) : train_rank(options, make_task);
}

int run_program(int argc, char** argv, CLI::App& app, TrainOptions options, const Choices& choices,
                const MakeTask& make_task) {
  add_options(app, options, choices);
  return end_process_with(parse_and_run(app, argc, argv, [&] { return run_parsed(options, make_task); }));
}

}  // namespace

int run(int argc, char** argv, const Task& task) {
  CLI::App app(concat("Trains ", task.name, " with lockstep"));
  TrainOptions defaults;
  defaults.model = task.name;
  Choices choices;
  if (!task.make_data) choices.datasets = dataset_kinds();
  return run_program(argc, argv, app, defaults, choices, [&task](const TrainOptions&) { return task; });
}

int run_builtin(int argc, char** argv) {
  CLI::App app("Trains a model", "lockstep train");
  return run_program(argc, argv, app, {}, {.models = model_names(), .datasets = dataset_kinds()},
                     [](const TrainOptions& options) { return model_task(options.model); });
}

}  // namespace lockstep
