// SPDX-License-Identifier: Apache-2.0
#include "lockstep/run.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <CLI/CLI.hpp>

#include "lockstep/base/command_line.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/world_state.h"
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
#include "lockstep/train/ranks_and_devices.h"
#include "lockstep/train/timeline.h"

namespace lockstep {
namespace {

using MakeTask = std::function<Task(const TrainOptions&)>;

// --threads, else what OMP_NUM_THREADS says (a launcher's doing), else a thread for each of this rank's cores.
void use_threads(const TrainOptions& options, const World& world) {
  const char* told = std::getenv("OMP_NUM_THREADS");
  int threads = options.threads;
  if (threads == 0 && options.strategy.ddp.virtual_shards > 0)
    threads = 1;  // the same in every arrangement: more change the bits
  if (threads == 0 && (told == nullptr || !parse_int(told, threads) || threads <= 0))
    threads = static_cast<int>(world.cores().size());
  at::set_num_threads(threads);
}

// Where the rank itself computes: on its GPU, or the cores that --devices names for it. Where devices are threads they have
// places of their own, and the rank is on the CPU.
torch::Device settle(const TrainOptions& options, const std::vector<DevicePlace>& places) {
  if (strategy_info(options.strategy.kind).threads) return torch::kCPU;
  const DevicePlace& place = places.front();
  if (!place.cores.empty()) pin_this_thread(place.cores);
  if (!place.device.is_cpu()) c10::impl::VirtualGuardImpl(place.device.type()).setDevice(place.device);
  return place.device;
}

// With what depends on this rank.
StrategyOptions strategy_options(const TrainOptions& options, const JobEnvironment& job,
                                 const std::vector<DevicePlace>& places) {
  StrategyOptions strategy = options.strategy;
  strategy.devices = static_cast<int>(places.size());
  strategy.places = places;
  strategy.kvstore.serves = is_server(options, job);
  return strategy;
}

// One rank, from its first connection to its last step.
int train_rank(const TrainOptions& options, const MakeTask& make_task) {
  keep_freed_memory();
  const Task task = make_task(options);
  const Datasets datasets = load_datasets(options.source, task);
  const JobEnvironment job = read_job_environment();
  const auto places = places_of_rank(options, job);
  const World world = WorldState::from_env_on(settle(options, places), options.strategy.timeout);
  use_threads(options, world);
  const auto strategy = make_strategy(world, task, strategy_options(options, job, places));
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
  if (!options.trace.empty()) remove_rings(options.trace);
  const LaunchResult result = launch(launching, [&] { return train_rank(options, make_task); });
  if (result.failure) std::cerr << describe(*result.failure, launching) << std::endl;
  if (!options.trace.empty()) save_what_is_left(options.trace);
  return result.exit_code;
}

// A rank that another launcher has started, or the only one: no launcher of ours looks after its trace.
int train_alone(const TrainOptions& options, const MakeTask& make_task, int rank) try {
  return train_rank(options, make_task);
} catch (...) {
  if (rank == 0 && !options.trace.empty()) save_what_is_left(options.trace);
  throw;
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
  return start_here ? start_ranks(options, make_task) : train_alone(options, make_task, job.rank);
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
