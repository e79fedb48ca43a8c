// SPDX-License-Identifier: Apache-2.0
// train/options/options.h: every option of `lockstep train` and lockstep::run().
//
// Flow:    argv, --config FILE -> option_table() -> TrainOptions -> strategy/, train/loop.h, and the checkpoints'
//          fingerprint
// Threads: a value
// Ranks:   every rank parses the same command line
//
// To add an option: a field in the struct that uses it, and one row in option_table() (options.cc). The parser, --help,
// --config, the checks and the refusal of --resume with another value all come from that row.
#pragma once

#include <signal.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "agent/watch/hang_options.h"
#include "lockstep/datasets.h"
#include "lockstep/loader.h"
#include "lockstep/schedule.h"
#include "lockstep/strategy.h"

namespace CLI {
class App;
}

namespace lockstep {

using Json = nlohmann::ordered_json;

struct LearningRateOptions {
  LrScaling scaling = LrScaling::kNone;
  int64_t base_batch_size = 256;  // the batch that the optimizer's lr suits
  ScheduleKind schedule = ScheduleKind::kConstant;
  double warmup_epochs = 0;
  double floor = 0;              // schedules linear and cosine end with this share of lr
  double drop_every_epochs = 1;  // schedule step
  double drop_factor = 0.1;      // schedule step
};

// How a run ends that was asked to stop, once its checkpoint is written.
enum class AfterStop { kExit, kRequeue, kWait };

struct PreemptionOptions {
  std::string signals = "SIGTERM,SIGUSR1";  // that ask it to stop, beside SIGINT
  std::string then = "143";                 // exit code; "requeue"; "wait": stay until killed
};

struct StopPlan {
  std::vector<int> signals;
  AfterStop then = AfterStop::kExit;
  int code = 128 + SIGTERM;  // of a run that was stopped
};
StopPlan stop_plan(const PreemptionOptions& options);  // throws UsageError

// Says what a program does with a model.
enum class Use { kTrain, kEval, kPredict };

struct TrainOptions {
  Use use = Use::kTrain;
  std::string output;  // predict: the file
  std::string model = "lenet";
  std::string weights;                      // file that the model begins with; empty: random
  std::string freeze;                       // regular expression for names of parameters that stay; empty: none
  int64_t classes = 0;                      // of the model; 0: as many as the data has
  DataSource source{.data = "auto"};        // auto: what suits the model
  LoaderOptions loader{.batch_size = 256};  // training shuffles with strategy.seed
  StrategyOptions strategy{.optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9}, .seed = 1};
  bool chooses_strategy = false;  // --strategy auto: strategy.kind is not set yet
  LearningRateOptions learning_rate;
  double label_smoothing = 0;  // of a task whose loss is CrossEntropy
  int64_t epochs = 5;

  std::string ranks;                          // a number, or "auto": one per core or GPU; empty: 1, or one for each of
                                              // `devices`. Where no launcher has started any
  std::vector<int> devices_per_worker{};      // empty: --ranks counts the devices of this process
  std::string devices = "auto";               // of this machine: auto, cpu, cuda (all GPUs), or a list of them
  std::optional<torch::DeviceType> device{};  // none: a GPU for every device if there are as many, else the CPU
  int threads = 0;                            // per rank; 0: cores / ranks

  std::string command;            // that started the program, as a shell takes it; for the metrics, as the next is
  std::string launcher = "none";  // that started the ranks (agent/clusters/environment.h)
  std::string metrics;
  std::string on_event;     // for sh; empty: none
  std::string trace;        // file
  std::string trace_steps;  // "100:120"; empty: all
  std::string checkpoint_dir;
  int64_t checkpoint_every = 0;                    // steps; 0: at the end of each epoch
  int64_t checkpoint_shard_bytes = 5'000'000'000;  // a checkpoint above this becomes several files
  bool resume = false;
  int64_t from_step = 0;   // with resume: go back to the checkpoint of this step; 0: the newest
  std::string fit;         // for checkpoints: what to_text() of train/builtin.h says
  bool keep_best = false;  // also the checkpoint of the epoch with the lowest validation loss
  int64_t patience = 0;    // epochs without a lower one after which training ends; 0: all epochs
  PreemptionOptions preemption;
  int max_restarts = 0;  // of ranks that fail, where ranks are started here
  int min_ranks = 0;     // go on with so many, with no restart left; 0: with all or none
  HangOptions hang;
  int64_t max_steps = 0;  // stop after this many steps in all; 0: after the epochs
  bool quiet = false;
  bool insecure_network = false;  // no secret, no encryption between machines
};

// The models and datasets that the command line offers.
struct Choices {
  std::vector<std::string> models;    // empty: the program brings its own
  std::vector<std::string> datasets;  // likewise
  Use use = Use::kTrain;
};

// Every row of option_table() as an option of `app`, which fills `options` when it parses. Both must outlive parsing.
void add_options(CLI::App& app, TrainOptions& options, const Choices& choices);

// Ranges, and options that exclude each other. Throws UsageError naming the option.
void check_options(const TrainOptions& options);

// Values of all options, by name.
Json all_settings(const TrainOptions& options);

// Values of all options that must be the same when a run is resumed, by name; null: the option does not apply.
Json resume_fingerprint(const TrainOptions& options);

}  // namespace lockstep
