// SPDX-License-Identifier: Apache-2.0
#include "lockstep/run.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <CLI/CLI.hpp>

#include "agent/clusters/environment.h"
#include "agent/recover/job_memory.h"
#include "agent/start/launcher.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/log.h"
#include "lockstep/base/process/process_title.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/collective/world/world_state.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"
#include "lockstep/memory.h"
#include "lockstep/models.h"
#include "lockstep/observe/timeline_file.h"
#include "lockstep/recovery.h"
#include "lockstep/step/layout.h"
#include "lockstep/stop.h"
#include "lockstep/strategy/strategies.h"
#include "lockstep/train/builtin.h"
#include "lockstep/train/end_process.h"
#include "lockstep/train/loop.h"
#include "lockstep/train/options/options.h"
#include "lockstep/train/options/ranks_and_devices.h"
#include "lockstep/train/reports/metrics.h"
#include "lockstep/train/use_model.h"
#include "tools/plan/auto.h"

namespace lockstep {
namespace {

struct Program {
  int argc;
  char** argv;
  std::function<Task(const TrainOptions&)> make_task;
};

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

// Chooses where the rank itself computes: on its GPU, or the cores that --devices names for it. Where devices are threads they have
// places of their own, and the rank is on the CPU; a stage of a pipeline that is a process is one device.
torch::Device settle(const TrainOptions& options, const std::vector<DevicePlace>& places, const JobEnvironment& job) {
  const bool is_stage = options.strategy.kind == StrategyKind::kPipeline && job.world_size > 1;
  if (strategy_info(options.strategy.kind).threads && !is_stage) return torch::kCPU;
  const DevicePlace& place = places.front();
  if (!place.cores.empty()) pin_this_thread(place.cores);
  if (!place.device.is_cpu()) {
    require_gpus(place.device.index());
    c10::impl::VirtualGuardImpl(place.device.type()).setDevice(place.device);
  }
  return place.device;
}

// Adds to the strategy's options what depends on this rank.
StrategyOptions strategy_options(const TrainOptions& options, const std::vector<DevicePlace>& places) {
  StrategyOptions strategy = options.strategy;
  strategy.devices = static_cast<int>(places.size());
  strategy.places = places;
  return strategy;
}

// A job that a scheduler has started again goes on where it was.
bool is_restarted() {
  int restarts = 0;
  const char* const slurm = std::getenv("SLURM_RESTART_COUNT");
  return slurm != nullptr && parse_int(slurm, restarts) && restarts > 0;
}

// Signals that came since `lockstep` was started have waited until now (cli/main.cc).
void catch_signals(const PreemptionOptions& options) {
  catch_stop_signals(stop_plan(options).signals);
  sigset_t waiting;
  ::sigemptyset(&waiting);
  for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) ::sigaddset(&waiting, signal);
  ::sigprocmask(SIG_UNBLOCK, &waiting, nullptr);
}

// scontrol has deadlines of its own (Slurm's MessageTimeout).
void requeue(const World& world) {
  const Tensor done = torch::ones({1});
  if (world.rank() == 0 && std::system("scontrol requeue \"$SLURM_JOB_ID\"") != 0) done.zero_();
  world.broadcast(done);
  if (done.item<float>() == 0)
    throw SystemError({.what = "scontrol requeue failed",
                       .here = world.describe(),
                       .likely = "a job that was submitted with --no-requeue, or no scontrol on this node",
                       .next = "the checkpoint is written: submit the job again, with --resume"});
}

// How a rank ends after its job was asked to stop: the exit code. Or asks Slurm to put the job into its queue again (rank 0 runs
// scontrol) and stays until it is killed, because a job that ends by itself counts as done. All ranks call. Throws SystemError on
// all ranks if scontrol fails.
int end_as_asked(const World& world, const PreemptionOptions& options) {
  const auto [signals, then, code] = stop_plan(options);
  if (then == AfterStop::kExit) return code;
  if (then == AfterStop::kRequeue) {
    requeue(world);
    ::signal(SIGTERM, SIG_DFL);  // Slurm's, which ends the job now that it is queued again
  }
  if (world.rank() == 0) log_info("waiting until the scheduler ends this job");
  for (;;) ::pause();  // without a deadline: this is what was asked for. A second Ctrl-C ends it, too
}

// Runs body(World, places of this rank's devices) once the ranks are connected.
template <class Body>
int with_world(const TrainOptions& options, const Program& program, const Body& body) {
  const JobEnvironment job = read_job_environment();
  show_rank(program.argc, program.argv, job.rank, job.world_size);
  const auto places = places_of_rank(options, job);
  return on_gpus(join(names_of(places), " or "), [&] {
    const World world =
        WorldState::from_env({.device = settle(options, places, job), .timeout = options.strategy.timeout});
    use_threads(options, world, job);
    return body(world, places);
  });
}

// One rank in one generation of the job, from its first connection to its last step.
int train_generation(TrainOptions options, const Program& program, const Task& task, const Datasets& datasets) {
  if (const JobMemory* memory = JobMemory::get()) options.resume = options.resume || memory->generation() > 0;
  return with_world(options, program, [&](const World& world, const std::vector<DevicePlace>& places) {
    const auto strategy = make_strategy(world, task, strategy_options(options, places));
    TrainingLoop loop(world, task, datasets, *strategy, options);
    loop.run();
    return loop.stopped() ? end_as_asked(world, options.preemption) : 0;
  });
}

int train_rank(TrainOptions options, const Program& program) {
  keep_freed_memory();
  Task task = program.make_task(options);
  const Datasets datasets = load_datasets(options.source, task);
  task = with_named_targets(smoothed(fitted(task, datasets, options.classes), options.label_smoothing));
  if (!options.weights.empty()) task = with_weights(std::move(task), options.weights);
  if (!options.freeze.empty()) task = with_frozen(std::move(task), options.freeze);
  options.fit = to_text({.sample = task.sample, .data = datasets.facts});
  return recover([&] { return train_generation(options, program, task, datasets); });
}

int run_rank(const TrainOptions& options, const Program& program) {
  if (options.use == Use::kTrain) return train_rank(options, program);
  return with_world(options, program, [&](const World& world, const auto&) {
    use_model(world, options, program.make_task);
    return 0;
  });
}

int start_ranks(const TrainOptions& options, const Program& program) {
  const int servers = server_count(options);
  StopPlan stop = stop_plan(options.preemption);
  stop.signals.push_back(SIGINT);
  const FailureOptions failing{
      .max_restarts = options.max_restarts,
      .min_ranks = options.min_ranks,
      .workers_may_fail = servers > 0 && goes_on_without_workers(options.strategy.kvstore.kind),
      .stop_signals = stop.signals,
      .stop_code = stop.code,
      .hang = options.hang};
  if (!options.trace.empty()) remove_rings(options.trace);
  const LaunchResult result = launch(
      {.ranks = ranks_to_start(options), .servers = servers, .first_is_plain = true},
      [&] { return run_rank(options, program); }, failing);
  if (result.failure) std::cerr << describe(*result.failure) << std::endl;
  if (!options.trace.empty()) save_what_is_left(options.trace);
  return result.exit_code;
}

// Those that remain where ranks end when they like. With LOCKSTEP_TRACE they are what was asked for.
void mention_rings(const std::string& file) {
  const char* const told = std::getenv("LOCKSTEP_TRACE");
  if (file.empty() || (told != nullptr && told == file) || !std::filesystem::exists(ring_file(file, 0))) return;
  log_info(concat("each rank leaves what it did beside ", file, "; when all have ended, `lockstep trace ", file,
                  "` puts it together"));
}

// A rank that another launcher has started, or the only one: no launcher of ours looks after its trace.
int train_alone(const TrainOptions& options, const Program& program, int rank) try {
  const int code = run_rank(options, program);
  if (rank == 0) mention_rings(options.trace);
  return code;
} catch (...) {
  if (rank == 0 && !options.trace.empty()) save_what_is_left(options.trace);
  throw;
}

// Says once, before any rank is started, what every rank would complain about.
void check_before_start(const TrainOptions& options, const Program& program, int ranks, int fewest_ranks) {
  if (options.use != Use::kTrain) return require_output(options);
  static_cast<void>(smoothed(program.make_task(options), options.label_smoothing));
  require_batch_for_ranks(options.loader.batch_size, devices_in_all(options, ranks));
  require_shards_for_fewer_ranks(options.strategy.ddp.virtual_shards, fewest_ranks, ranks);
  if (!options.checkpoint_dir.empty()) CheckpointFolder{options.checkpoint_dir};
}

// ---- --strategy auto

// The first option given that not every other strategy has; empty: there is none.
std::string option_of_ddp(const TrainOptions& options) {
  const StrategyOptions& strategy = options.strategy;
  const std::pair<const char*, bool> given[] = {{"--max-restarts", options.max_restarts > 0},
                                                {"--min-ranks", options.min_ranks > 0},
                                                {"--precision float16", strategy.precision == Precision::kFloat16},
                                                {"--virtual-shards", strategy.ddp.virtual_shards > 0},
                                                {"--accumulate", strategy.accumulate > 1},
                                                {"--no-decay", !strategy.no_decay.empty()},
                                                {"--separate-parameters", !strategy.ddp.share_parameters},
                                                {"--compression", strategy.compression.kind != Compression::kNone}};
  const auto* const first = std::ranges::find_if(given, [](const auto& each) { return each.second; });
  return first == std::end(given) ? "" : first->first;
}

void say(const std::string& text) { log_info(concat("--strategy auto is ", text)); }

// Sets the strategy that `lockstep plan` would recommend for this machine, its devices and this batch, and logs in one line which
// and why. Before ranks are started, and before this process has threads: it forks. Blocks for 20 to 30 s where there is a
// choice.
void choose_strategy(TrainOptions& options, const Task& task) {
  require(options.launcher == "none", concat("--strategy auto in ranks that ", options.launcher, " has started"),
          "ask lockstep plan, and give --strategy what it recommends");
  options.strategy.kind = StrategyKind::kDdp;
  const int devices = ranks_to_start(options);
  if (devices == 1) {
    options.strategy.kind = StrategyKind::kSingle;
    return say("single: there is one device");
  }
  if (const std::string option = option_of_ddp(options); !option.empty())
    return say(concat("ddp: not every other strategy has ", option));
  const auto wanted = wanted_kind(options);  // unless told: GPUs if there are enough
  require(wanted ? *wanted != torch::kCUDA : cuda_device_count_before_fork() < devices,
          "--strategy auto with GPUs, of which it has no measurements",
          "choose a --strategy (ddp suits nearly always), or train on cores: --device cpu");
  require_batch_for_ranks(options.loader.batch_size, devices);
  log_info(concat("--strategy auto measures ", task.name, " on this machine, 20 to 30 s"));
  plan::Subject subject{.task = fitted_before_fork(task, options.source, options.classes),
                        .strategy = options.strategy,
                        .batch = options.loader.batch_size,
                        .data = [&] { return load_datasets(options.source, task); }};
  const bool names_cores = options.devices != "auto" && options.devices != "cpu";  // of each device
  say(plan::choose_strategy(subject, devices, !names_cores));
  options.strategy = subject.strategy;
  if (options.strategy.kind != StrategyKind::kSingle) return;
  options.ranks = "1";  // which has the cores of all
  options.threads = options.threads > 0 ? options.threads * devices : allotted_cores();
}

// False: it was asked to stop meanwhile.
bool choose(TrainOptions& options, const Program& program) try {
  choose_strategy(options, program.make_task(options));
  options.chooses_strategy = false;
  return true;
} catch (const SystemError&) {
  if (stop_signal() == 0) throw;
  return false;
}

// ---- The program

int run_parsed(TrainOptions options, const Program& program) {
  const JobEnvironment job = read_job_environment();
  const char* const trace = std::getenv("LOCKSTEP_TRACE");
  if (trace != nullptr && options.trace.empty()) options.trace = trace;
  if (job.rank == 0) check_options(options);
  if (options.insecure_network) ::setenv("LOCKSTEP_INSECURE_NETWORK", "1", 1);
  catch_signals(options.preemption);
  options.command = command_of(program.argc, program.argv);
  options.launcher = job.launcher;
  options.resume = options.resume || is_restarted();  // without a checkpoint from step 0; metrics and curves are kept
  if (options.use != Use::kTrain) options.hang.timeout = {};  // nothing here counts as progress
  if (options.chooses_strategy && !choose(options, program)) return stop_plan(options.preemption).code;
  if (job.local_rank == 0 && wanted_kind(options) != torch::kCPU) hint_at_unused_gpus();
  const bool start_here = job.launcher == "none" && (ranks_to_start(options) > 1 || options.max_restarts > 0);
  if (start_here)
    check_before_start(options, program, ranks_to_start(options), options.min_ranks);
  else if (job.rank == 0)
    check_before_start(options, program, job.world_size, fewest_ranks_of_launcher());
  if (start_here) show_no_rank(program.argc, program.argv);
  return start_here ? start_ranks(options, program) : train_alone(options, program, job.rank);
}

// The first word of the command line, if it is no option.
Use use_of(int argc, char** argv) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  return first == "eval" ? Use::kEval : first == "predict" ? Use::kPredict : Use::kTrain;
}

// program: as the user calls it.
int run_program(int argc, char** argv, const std::string& program_name, TrainOptions options, Choices choices,
                std::function<Task(const TrainOptions&)> make_task) {
  choices.use = use_of(argc, argv);
  const Program program{argc, argv, std::move(make_task)};
  CLI::App app(choices.use == Use::kEval      ? "Measures a checkpoint's model on a dataset"
               : choices.use == Use::kPredict ? "Writes the outputs of a checkpoint's model for each sample"
                                              : "Trains a model; with eval or predict as first word, uses a checkpoint",
               program_name);
  if (choices.use != Use::kTrain) {
    app.name(concat(program_name, ' ', argv[1]));
    --argc;
    ++argv;
  } else if (!choices.models.empty()) {
    app.name(program_name + " train");
  }
  add_options(app, options, choices);
  return end_process_with(parse_and_run(app, argc, argv, [&] { return run_parsed(options, program); }));
}

}  // namespace

int run(int argc, char** argv, const Task& task) {
  TrainOptions defaults;
  defaults.model = task.name;
  Choices choices;
  if (!task.make_data) choices.datasets = dataset_kinds();
  return run_program(argc, argv, argv[0], defaults, choices, [&task](const TrainOptions&) { return task; });
}

int run_builtin(int argc, char** argv) {
  return run_program(argc, argv, "lockstep", {}, {.models = model_names(), .datasets = dataset_kinds()},
                     [](const TrainOptions& options) { return model_task(options.model); });
}

}  // namespace lockstep
