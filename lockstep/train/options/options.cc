// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/options/options.h"

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <map>
#include <memory>

#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/observe/timeline_file.h"
#include "lockstep/strategy/option_names.h"
#include "lockstep/timeline.h"
#include "lockstep/train/options/option_table.h"
#include "lockstep/train/options/ranks_and_devices.h"

namespace lockstep {

namespace {

Option unless(bool left_out, Option option) {
  option.offered = !left_out;
  return option;
}

Option common(Option option) {
  option.common = true;
  return option;
}

constexpr Limits kBelowOne{.at_least = 0, .below = 1};

bool depends_on_epochs(ScheduleKind schedule) {
  return schedule == ScheduleKind::kLinear || schedule == ScheduleKind::kCosine;
}

std::vector<Option> data_table(TrainOptions& o, const Choices& choices) {
  const bool own_model = choices.models.empty();
  const bool own_data = choices.datasets.empty();
  return {
      common(
          unless(own_model, option("--model", o.model, kSame,
                                   concat("model to train, or a TorchScript file.pt: ", join(choices.models, ", "))))),
      option("--weights", o.weights, kMayChange,
             "safetensors file of initial weights, from lockstep, torchvision or Hugging Face"),
      option("--freeze", o.freeze, kSame, "regular expression for names of parameters that are not trained"),
      common(unless(own_data, option("--data", o.source.data, kSame,
                                     concat("dataset, KIND[:PATH][?OPTIONS]: ", join(choices.datasets, ", "))))),
      unless(own_model, option("--classes", o.classes, kMayChange,
                               "outputs of the model; 0: as many classes as the data has", kFromZero)),
      common(option("--data-dir", o.source.folder, kMayChange, "folder that holds the dataset")),
      common(unless(own_data, option("--augment", o.source.augment, kSame,
                                     "transforms of training images, such as crop:4,flip; docs/data.md lists them"))),
      option("--workers", o.loader.workers, kMayChange, "threads per rank that load batches ahead; 0: none", kFromZero),
      option("--prefetch", o.loader.prefetch, kMayChange, "most batches loaded ahead per rank", kFromOne),
      option("--skip-bad", o.loader.skip_bad, kMayChange, "unreadable samples that each rank may skip per epoch",
             kFromZero),
      common(option("--epochs", o.epochs, same_if(depends_on_epochs(o.learning_rate.schedule)),
                    "passes over the dataset", kFromOne)),
      common(option("--batch-size", o.loader.batch_size, kSame, "global batch, over all ranks", kFromOne)),
      option("--accumulate", o.strategy.accumulate, kSame,
             "gradient accumulation: batches of --batch-size per step, one after another", kFromOne),
      option("--label-smoothing", o.label_smoothing, kSame,
             "share of each target spread over all classes, in training and validation", kBelowOne),
      common(option("--seed", o.strategy.seed, kSame, "of the initial weights and the order of the data")),
  };
}

constexpr const char* kAuto = "auto";

std::vector<std::string> strategy_names() {
  std::vector<std::string> names = names_in(strategies());
  names.emplace_back(kAuto);
  return names;
}

// Which ranks and devices there are, and what they compute in.
std::vector<Option> device_table(TrainOptions& o) {
  StrategyOptions& s = o.strategy;
  return {
      common(choice(
          "--strategy", strategy_names(),
          [&o] { return o.chooses_strategy ? std::string(kAuto) : strategy_info(o.strategy.kind).name; },
          [&o](const std::string& name) {
            o.chooses_strategy = name == kAuto;
            if (!o.chooses_strategy) o.strategy.kind = row_named(strategies(), name, "--strategy").kind;
          },
          kMayChange, "how ranks divide the work, see below; auto: what lockstep plan recommends for this machine")),
      common(option("--ranks", o.ranks, kMayChange,
                    "ranks to start on this machine, or auto: one per core or GPU. Default: one, or one for each of "
                    "--devices")),
      option("--devices-per-worker", o.devices_per_worker, kMayChange,
             "devices in each rank, where devices are threads; 2,1,4: in the first, the second ..."),
      option("--threads", o.threads, kMayChange,
             "threads per rank, or per device where devices are threads; 0: one per core", kFromZero),
      common(option("--devices", o.devices, kMayChange,
                    "of this machine: auto, cpu, cuda (all GPUs), cuda:0,cuda:1 or cores: cpu:0-3,cpu:4-7")),
      option("--device", o.device, kMayChange, "the kind of device, where --devices does not say it"),
      common(option("--precision", s.precision, kSame, "of forward and backward; parameters stay float32")),
      flag("--checkpoint-activations", s.checkpoint_activations, kMayChange,
           "save memory: backward recomputes each piece of the model"),
      option("--layout", s.layout, kSame, "memory format of images"),
      seconds("--timeout", s.timeout, kMayChange, "seconds to wait for another rank"),
      seconds("--hang-timeout", o.hang.timeout, kMayChange,
              "seconds without progress of any rank until stacks are shown; 0: never", /*at_least=*/0),
      option("--on-hang", o.hang.then, kMayChange,
             "then: restart (kill the rank that holds up the others; it counts as failed), end the job, or report"),
  };
}

// Options of one strategy or two.
std::vector<Option> strategy_table(TrainOptions& o) {
  StrategyOptions& s = o.strategy;
  const bool kvstore = s.kind == StrategyKind::kKVStore;
  return {
      option("--algorithm", s.algorithm, kMayChange, "towers, ddp: how gradients are combined"),
      option("--update", s.towers.update, kMayChange, "towers: on every device, or once on the cpu"),
      flag("--refuse-uneven", s.towers.refuse_uneven, kMayChange,
           "towers: a batch that does not divide evenly is an error"),
      option("--average-every", s.averaging.every, kSame, "averaging: batches between averages", kFromOne),
      option("--outer-lr", s.averaging.outer_lr, kSame,
             "averaging: learning rate of the outer step; 1: the plain average"),
      option("--outer-momentum", s.averaging.outer_momentum, kSame, "averaging: momentum of the outer step"),
      option("--average-parts", s.averaging.parts, kSame, "averaging: parts of the parameters, averaged in turn",
             kFromOne),
      option("--average-delay", s.averaging.delay, kSame,
             "averaging: batches that go on while a part is exchanged; 0: none", kFromZero),
      option("--average-mix", s.averaging.mix, kSame,
             "averaging with a delay: share of a replica's own parameters when the average comes", kBelowOne),
      option("--average-in", s.averaging.in, kSame, "averaging: what the change is sent in, between machines"),
      option("--kvstore", s.kvstore.kind, same_if(kvstore), "kvstore: its kind"),
      option("--servers", s.kvstore.servers, kMayChange, "kvstore dist_*: servers, besides --ranks workers", kFromOne),
      option("--update-on-kvstore", s.kvstore.update_on_kvstore, kMayChange,
             "kvstore dist_sync: false: workers update"),
      option("--staleness", s.kvstore.staleness, same_if(kvstore && s.kvstore.kind == KVStoreKind::kDistBounded),
             "kvstore dist_bounded: largest delay of a gradient, in updates"),
      option("--adapt-to-delay", s.kvstore.adapt_to_delay, same_if(kvstore),
             "kvstore dist_async, dist_bounded: false: one optimizer for all workers' gradients"),
      option("--split-above", s.kvstore.split_above, kMayChange,
             "kvstore: elements from which a weight is split over the servers"),
      option("--stages", s.pipeline.stages, kMayChange, "pipeline: how many, or the pieces of each, such as 0-4,5-9"),
      option("--micro-batches", s.pipeline.micro_batches, kMayChange, "pipeline: parts of each batch", kFromOne),
      option("--pipeline-schedule", s.pipeline.schedule, kMayChange, "pipeline: order of the micro-batches"),
      flag("--separate-parameters", s.ddp.share_parameters, kMayChange,
           "a copy in every rank instead of one per machine",
           /*on=*/false),
      option("--bucket-mib", s.ddp.bucket_mib, kMayChange,
             "ddp between machines and GPUs: MiB of gradients that are exchanged at once; 0: 8 between CPUs without "
             "compression, else 25",
             kFromZero),
      option("--compression", s.compression.kind, kSame, "of gradients between ranks"),
      option("--compression-amount", s.compression.amount, kSame,
             "powersgd: rank, 2bit: threshold, topk: share; 0: its default"),
      option("--virtual-shards", s.ddp.virtual_shards, kSame,
             "the same bits on any number of ranks that divides this; 0: off", kFromZero),
  };
}

// Giving it is an error where it would have no effect. is_used: asks options that stand before it in the table, which the
// parser has read by then.
Option needs(const std::string& what, std::function<bool()> is_used, Option option) {
  option.add = [=, name = option.name, add = option.add](CLI::App& app) {
    add(app);
    app.get_option(name)->check([=](const std::string&) {
      require(is_used(), name + " has no effect with these options", concat("it needs ", what, "; else leave it out"));
      return std::string();
    });
  };
  return option;
}

std::string optimizers_with(const std::string& key) {
  std::vector<std::string> names = optimizer_names();
  std::erase_if(names, [&](const auto& name) { return !values_of(optimizer_options(name)).contains(key); });
  return "--optimizer " + join(names, " or ");
}

// A number that some optimizers have.
template <class Value>
Option of_optimizer(const std::string& name, const std::string& key, OptimizerOptions& optimizer,
                    const std::string& help, Limits limits = {}) {
  const auto is_used = [&optimizer, key] { return values_of(optimizer).contains(key); };
  const auto get = [=, &optimizer] {
    return is_used() ? Json(static_cast<Value>(values_of(optimizer).at(key))) : Json();
  };
  const auto set = [&optimizer, key](const Value& value) {
    OptionValues values = values_of(optimizer);
    values[key] = static_cast<double>(value);
    optimizer = optimizer_options(name_of(optimizer), values);
  };
  const Option row{.name = name, .help = help, .on_resume = kSame, .value = get, .limits = limits};
  const std::string what = optimizers_with(key);
  if constexpr (std::is_same_v<Value, bool>) return needs(what, is_used, switched(row, set));
  const Json now = get();
  return needs(what, is_used, typed<Value>(row, set, now.is_null() ? "" : now.dump()));
}

std::vector<Option> update_table(TrainOptions& o) {
  StrategyOptions& s = o.strategy;
  OptimizerOptions& optimizer = s.optimizer;
  LearningRateOptions& rate = o.learning_rate;
  const auto choose = [&optimizer](const std::string& name) {
    if (name != name_of(optimizer)) optimizer = optimizer_options(name);
  };
  const auto drops = [&rate] { return rate.schedule == ScheduleKind::kStep; };
  return {
      common(choice(
          "--optimizer", optimizer_names(), [&optimizer] { return name_of(optimizer); }, choose, kSame, "update rule")),
      common(of_optimizer<double>("--lr", "lr", optimizer, "learning rate; each optimizer has a default of its own",
                                  kFromZero)),
      common(of_optimizer<double>("--momentum", "momentum", optimizer, "sgd, lars and rmsprop")),
      of_optimizer<bool>("--nesterov", "nesterov", optimizer, "sgd only"),
      of_optimizer<double>("--beta1", "beta1", optimizer, "adam, adamw and lamb: of the mean gradient", kBelowOne),
      of_optimizer<double>("--beta2", "beta2", optimizer, "adam, adamw and lamb: of its square", kBelowOne),
      of_optimizer<double>("--eps", "eps", optimizer, "added to a root: all but sgd and lars", kFromZero),
      common(of_optimizer<double>("--weight-decay", "weight_decay", optimizer, "shrinks the weights in each step")),
      option("--no-decay", s.no_decay, kSame, "norm,bias: no weight decay for these parameters"),
      option("--clip-norm", s.clipping.max_norm, kSame, "largest 2-norm of all gradients together; 0: off", kFromZero),
      option("--clip-value", s.clipping.max_value, kSame, "largest element of a gradient; 0: off", kFromZero),
      option("--ema-decay", s.ema_decay, kSame, "also keep a moving average of the weights; 0: off", kBelowOne),
      option("--lr-scaling", rate.scaling, kSame, "how --lr grows with the batch"),
      needs(
          "--lr-scaling", [&rate] { return rate.scaling != LrScaling::kNone; },
          option("--lr-base-batch-size", rate.base_batch_size, kSame, "the batch size that --lr is for", kFromOne)),
      common(option("--schedule", rate.schedule, kSame, "how --lr falls")),
      needs(
          "--schedule linear or cosine", [&rate] { return depends_on_epochs(rate.schedule); },
          option("--lr-floor", rate.floor, kSame, "schedules linear and cosine: the share of --lr at which they end",
                 kBelowOne)),
      common(option("--warmup-epochs", rate.warmup_epochs, kSame, "linear rise of --lr at the start")),
      needs("--schedule step", drops,
            option("--drop-every-epochs", rate.drop_every_epochs, kSame, "schedule step only",
                   {.at_least = std::numeric_limits<double>::min()})),
      needs("--schedule step", drops, option("--drop-factor", rate.drop_factor, kSame, "schedule step only")),
  };
}

std::vector<Option> output_table(TrainOptions& o) {
  return {
      common(option("--metrics", o.metrics, kMayChange, "file for one JSON object per step, epoch and run")),
      option("--on-event", o.on_event, kMayChange, "command that reads the lines of --metrics from its stdin"),
      option("--trace", o.trace, kMayChange, "file (.json) for a timeline of all ranks, for ui.perfetto.dev"),
      option("--trace-steps", o.trace_steps, kMayChange, "with --trace: steps to record, such as 100:120"),
      common(option("--checkpoint-dir", o.checkpoint_dir, kMayChange, "folder for checkpoints (safetensors)")),
      option("--checkpoint-every", o.checkpoint_every, kMayChange, "steps; 0: each epoch", kFromZero),
      option("--checkpoint-shard-bytes", o.checkpoint_shard_bytes, kMayChange,
             "larger checkpoints become several files with an index, each of at most this or one tensor", kFromOne),
      common(flag("--resume", o.resume, kMayChange, "go on from the newest whole checkpoint of --checkpoint-dir")),
      flag("--keep-best", o.keep_best, kMayChange,
           "also keep the checkpoint of the epoch with the lowest validation loss; eval and predict then take it"),
      option("--patience", o.patience, kMayChange,
             "end after this many epochs without a lower validation loss; 0: train all epochs", kFromZero),
      option("--from-step", o.from_step, kMayChange,
             "with --resume: go back to the checkpoint of this step, also with another --lr; later ones are renamed",
             kFromZero),
      option("--preempt-signal", o.preemption.signals, kMayChange,
             "signals after which the run finishes its step, saves and stops: SIGTERM, SIGUSR1, SIGUSR2"),
      option("--on-stop", o.preemption.then, kMayChange,
             "what it does then: exit with this code (Grid Engine: 99); requeue: scontrol requeue; wait: until killed"),
      common(option(
          "--max-restarts", o.max_restarts, kMayChange,
          "how often a lost rank is replaced by a new process, which goes on at the same step; 0: it ends the job",
          kFromZero)),
      option("--min-ranks", o.min_ranks, kMayChange,
             "with no restart left, go on without lost ranks while at least this many remain; 0: end", kFromZero),
      common(
          option("--max-steps", o.max_steps, kMayChange, "stop after this many steps; 0: after the epochs", kFromZero)),
      flag("--quiet", o.quiet, kMayChange, "no progress and no table"),
      flag("--insecure-network", o.insecure_network, kMayChange, "between machines: no job secret, no encryption"),
  };
}

// Options that make sense without training.
constexpr std::string_view kWithoutTraining[] = {"--data",      "--data-dir",   "--workers",         "--prefetch",
                                                 "--skip-bad",  "--batch-size", "--ranks",           "--threads",
                                                 "--devices",   "--device",     "--timeout",         "--checkpoint-dir",
                                                 "--from-step", "--metrics",    "--insecure-network"};

std::string strategy_help() {
  const auto row = [](const char* name, const char* ranks, const char* description) {
    return concat("  ", std::left, std::setw(15), name, std::setw(11), ranks, description, "\n");
  };
  std::string table = row("strategy", "--ranks", "what it does");
  for (const StrategyInfo& info : strategies())
    table += row(info.name, info.threads ? "devices" : "processes", info.description);
  return table + "docs/strategies/ has a page for each.\n";
}

constexpr const char* kRareOptions = "MORE OPTIONS";

// Leaves out what only --help-all shows.
struct ShortHelp : CLI::Formatter {
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    const bool all = mode == CLI::AppFormatMode::All;
    return all ? CLI::Formatter().make_help(app, name, mode) : CLI::Formatter::make_help(app, name, mode);
  }
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override {
    return group == kRareOptions ? "" : CLI::Formatter::make_group(group, is_positional, options);
  }
};

// "--batch-size" -> "batch_size"
std::string key_of(const Option& option) {
  std::string key = option.name.substr(2);
  std::ranges::replace(key, '-', '_');
  return key;
}

Json fingerprint_of(const Option& option) {
  const Json value = option.value();
  if (option.on_resume.used) return value;
  return value.is_string() ? Json("") : Json(0);
}

void check_limits(const Option& option, double value) {
  const Limits& limits = option.limits;
  const std::string trouble = value >= limits.below ? concat(" is not below ", limits.below)
                              : limits.at_least > 0 ? " is not positive"
                                                    : " is negative";
  require(value >= limits.at_least && value < limits.below, concat(option.name, ' ', value, trouble),
          concat(option.name, " is: ", option.help));
}

}  // namespace

StopPlan stop_plan(const PreemptionOptions& options) {
  static const std::map<std::string, int> known = {{"SIGTERM", SIGTERM}, {"SIGUSR1", SIGUSR1}, {"SIGUSR2", SIGUSR2}};
  constexpr int kLastCode = 255;
  StopPlan plan;
  for (const std::string& name : split(options.signals, ',')) {
    require(known.contains(name), concat("--preempt-signal ", options.signals),
            "give SIGTERM, SIGUSR1 or SIGUSR2, or several with commas between them");
    plan.signals.push_back(known.at(name));
  }
  if (options.then == "requeue") plan.then = AfterStop::kRequeue;
  if (options.then == "wait") plan.then = AfterStop::kWait;
  if (plan.then != AfterStop::kExit) return plan;
  require(parse_int(options.then, plan.code) && plan.code >= 0 && plan.code <= kLastCode,
          concat("--on-stop ", options.then), "give an exit code from 0 to 255, or requeue, or wait");
  require(plan.code != 1 && plan.code != 2, concat("--on-stop ", options.then),
          "1 and 2 are the codes of errors: give another");
  return plan;
}

std::vector<Option> option_table(TrainOptions& options, const Choices& choices) {
  std::vector<Option> all;
  for (auto& table : {data_table(options, choices), device_table(options), strategy_table(options),
                      update_table(options), output_table(options)})
    all.insert(all.end(), table.begin(), table.end());
  return all;
}

void add_options(CLI::App& app, TrainOptions& options, const Choices& choices) {
  const bool trains = choices.use == Use::kTrain;
  options.use = choices.use;
  for (const Option& option : option_table(options, choices)) {
    if (!option.offered || (!trains && std::ranges::count(kWithoutTraining, option.name) == 0)) continue;
    option.add(app);
    if (trains && !option.common) app.get_option(option.name)->group(kRareOptions);
  }
  if (choices.use == Use::kPredict)
    app.add_option("--output", options.output, "file for the predictions: .csv, or .npy for the model's outputs")
        ->required();
  if (!trains) return;
  app.formatter(std::make_shared<ShortHelp>());
  app.set_help_flag("-h,--help", "show the common options");
  app.set_help_all_flag("--help-all", "show all options");
  app.set_config("--config", "", "read options from a TOML file; the command line wins");
  app.footer(strategy_help());
}

Json all_settings(const TrainOptions& options) {
  TrainOptions copy = options;  // the table's rows may write
  Json settings;
  for (const Option& option : option_table(copy, {})) settings[key_of(option)] = option.value();
  return settings;
}

Json resume_fingerprint(const TrainOptions& options) {
  TrainOptions copy = options;  // the table's rows may write
  Json fingerprint;
  for (const Option& option : option_table(copy, {}))
    if (option.on_resume.compared) fingerprint[key_of(option)] = fingerprint_of(option);
  return fingerprint;
}

void check_options(const TrainOptions& options) {
  TrainOptions copy = options;
  for (const Option& option : option_table(copy, {}))
    if (const Json value = option.value(); value.is_number()) check_limits(option, value);
  const StrategyInfo& strategy = strategy_info(options.strategy.kind);
  require(std::ranges::all_of(options.devices_per_worker, [](int devices) { return devices >= 1; }),
          "--devices-per-worker with a number below 1", "leave it out: --ranks counts the devices");
  require(options.devices_per_worker.empty() || strategy.threads,
          concat("--devices-per-worker with strategy ", strategy.name, ", whose ranks have one device each"),
          "leave it out, or choose a strategy whose devices are threads");
  require(!options.resume || !options.checkpoint_dir.empty(), "--resume without --checkpoint-dir",
          "name the folder to resume from");
  require(options.use == Use::kTrain || !options.checkpoint_dir.empty(), "no --checkpoint-dir",
          "name a folder with checkpoints, or one of its files");
  require(options.from_step == 0 || options.resume || options.use != Use::kTrain, "--from-step without --resume",
          "give --resume too");
  require(stop_plan(options.preemption).then != AfterStop::kRequeue || std::getenv("SLURM_JOB_ID") != nullptr,
          "--on-stop requeue outside of a Slurm job", "submit it with sbatch, or give an exit code");
  static_cast<void>(parse_steps(options.trace_steps));
  require(options.trace_steps.empty() || !options.trace.empty(), "--trace-steps without --trace", "name the file");
  require_timeline_file(options.trace);
  static_cast<void>(layerwise(options.strategy.optimizer));  // throws if they make no rule
}

}  // namespace lockstep
