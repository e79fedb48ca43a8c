#include "lockstep/train/options.h"

#include <algorithm>

#include <CLI/CLI.hpp>

#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"
#include "lockstep/strategy.h"
#include "lockstep/strategy/kvstore/kvstore_strategy.h"

namespace lockstep {
namespace {

std::string strategy_table() {
  const auto column = [](const std::string& text, std::size_t width) {
    return text + std::string(width - text.size(), ' ');
  };
  std::string table = concat("  ", column("strategy", 15), column("--ranks", 11), "what it does\n");
  for (const StrategyInfo& info : strategies())
    table +=
        concat("  ", column(info.name, 15), column(info.threads ? "devices" : "processes", 11), info.description, "\n");
  return table + "docs/strategies/ has a page for each.\n";
}

void add_data_options(CLI::App& app, TrainOptions& o, const Choices& choices) {
  if (!choices.models.empty())
    app.add_option("--model", o.model, concat("model to train: ", join(choices.models, ", ")))->capture_default_str();
  if (!choices.datasets.empty())
    app.add_option("--data", o.data,
                   concat("dataset to train on, KIND[:PATH][?OPTIONS]: ", join(choices.datasets, ", ")))
        ->capture_default_str();
  app.add_option("--data-dir", o.data_dir, "folder that holds the dataset");
  if (!choices.datasets.empty())
    app.add_option("--augment", o.augment,
                   "transforms of training images, such as crop:4,flip; docs/data.md lists them");
  app.add_option("--workers", o.workers, "threads per rank that load batches ahead; 0: none")->capture_default_str();
  app.add_option("--prefetch", o.prefetch, "batches that may lie ready per rank")->capture_default_str();
  app.add_option("--skip-bad", o.skip_bad, "unreadable samples of an epoch that each rank may leave out")
      ->capture_default_str();
  app.add_option("--epochs", o.epochs, "passes over the dataset")->capture_default_str();
  app.add_option("--batch-size", o.batch_size, "global batch, over all ranks")->capture_default_str();
  app.add_option("--seed", o.seed, "of the initial weights and the order of the data")->capture_default_str();
}

void add_strategy_options(CLI::App& app, TrainOptions& o) {
  app.add_option("--strategy", o.strategy, "how the replicas stay one model, see below")->capture_default_str();
  app.add_option("--ranks", o.ranks, "ranks to start on this machine, or auto: one per core")->capture_default_str();
  app.add_option("--devices-per-worker", o.devices_per_worker,
                 "devices in each rank, where devices are threads; 2,1,4: in the first, the second ...")
      ->delimiter(',');
  app.add_option("--algorithm", o.algorithm, "towers, ddp: how gradients are combined")
      ->check(CLI::IsMember({"direct", "central", "ring", "tree"}))
      ->capture_default_str();
  app.add_option("--update", o.update, "towers: on every device, or once on the cpu")
      ->check(CLI::IsMember({"device", "cpu"}))
      ->capture_default_str();
  app.add_flag("--refuse-uneven", o.refuse_uneven, "towers: a batch that does not divide evenly is an error");
  app.add_option("--average-every", o.average_every, "averaging: batches between averages")->capture_default_str();
  app.add_option("--outer-lr", o.outer_lr, "averaging: 1 takes the average as it is")->capture_default_str();
  app.add_option("--outer-momentum", o.outer_momentum, "averaging: of the outer step")->capture_default_str();
  app.add_option("--kvstore", o.kvstore, "kvstore: its kind")
      ->check(CLI::IsMember(kvstore_kinds()))
      ->capture_default_str();
  app.add_option("--servers", o.servers, "kvstore dist_*: servers, beside --ranks workers")->capture_default_str();
  app.add_option("--update-on-kvstore", o.update_on_kvstore, "kvstore dist_sync: false: workers update")
      ->capture_default_str();
  app.add_option("--staleness", o.staleness, "kvstore dist_bounded: largest delay of a gradient, in updates")
      ->capture_default_str();
  app.add_option("--split-above", o.split_above, "kvstore: elements from which a weight is split over the servers")
      ->capture_default_str();
  app.add_option("--stages", o.stages, "pipeline: how many, or the pieces of each, such as 0-4,5-9");
  app.add_option("--micro-batches", o.micro_batches, "pipeline: parts of each batch")->capture_default_str();
  app.add_option("--pipeline-schedule", o.pipeline_schedule, "pipeline: order of the micro-batches")
      ->check(CLI::IsMember({"naive", "gpipe", "1f1b"}))
      ->capture_default_str();
  app.add_option("--threads", o.threads, "threads per rank; 0: cores / ranks")->capture_default_str();
  app.add_option("--device", o.device, "where to compute")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--precision", o.precision, "of forward and backward; parameters stay float32")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->capture_default_str();
  app.add_option("--layout", o.layout, "memory order of images")
      ->check(CLI::IsMember({"auto", "contiguous", "channels_last"}))
      ->capture_default_str();
  app.add_option("--timeout", o.timeout, "seconds to wait for another rank")->capture_default_str();
}

void add_optimizer_options(CLI::App& app, TrainOptions& o) {
  app.add_option("--optimizer", o.optimizer, "update rule")
      ->check(CLI::IsMember({"sgd", "adam", "adamw", "lamb", "lars"}))
      ->capture_default_str();
  app.add_option("--lr", o.lr, "learning rate")->capture_default_str();
  app.add_option("--momentum", o.momentum, "sgd and lars")->capture_default_str();
  app.add_flag("--nesterov", o.nesterov, "sgd only");
  app.add_option("--weight-decay", o.weight_decay, "shrinks the weights in each step")->capture_default_str();
  app.add_option("--clip-norm", o.clip_norm, "largest 2-norm of all gradients together; 0: off")->capture_default_str();
  app.add_option("--clip-value", o.clip_value, "largest element of a gradient; 0: off")->capture_default_str();
  app.add_option("--ema-decay", o.ema_decay, "also keep a moving average of the weights; 0: off")
      ->capture_default_str();
  app.add_flag("--separate-parameters", o.separate_parameters, "a copy in every rank instead of one per machine");
  app.add_option("--compression", o.compression, "of gradients between ranks")
      ->check(CLI::IsMember({"none", "fp16", "bf16", "powersgd", "2bit", "topk"}))
      ->capture_default_str();
  app.add_option("--compression-amount", o.compression_amount,
                 "powersgd: rank, 2bit: threshold, topk: share; 0: its default")
      ->capture_default_str();
  app.add_option("--virtual-shards", o.virtual_shards, "the same bits on any number of ranks that divides this; 0: off")
      ->capture_default_str();
  app.add_option("--lr-scaling", o.lr_scaling, "how --lr grows with the batch")
      ->check(CLI::IsMember({"none", "sqrt", "linear"}))
      ->capture_default_str();
  app.add_option("--lr-base-batch-size", o.lr_base_batch_size, "the batch that --lr suits")->capture_default_str();
  app.add_option("--schedule", o.schedule, "how --lr falls")
      ->check(CLI::IsMember({"constant", "cosine", "step"}))
      ->capture_default_str();
  app.add_option("--warmup-epochs", o.warmup_epochs, "linear rise of --lr at the start")->capture_default_str();
  app.add_option("--drop-every-epochs", o.drop_every_epochs, "schedule step only")->capture_default_str();
  app.add_option("--drop-factor", o.drop_factor, "schedule step only")->capture_default_str();
}

void add_output_options(CLI::App& app, TrainOptions& o) {
  app.add_option("--metrics", o.metrics, "file for one JSON object per step, epoch and run");
  app.add_option("--checkpoint-dir", o.checkpoint_dir, "folder for checkpoints (safetensors)");
  app.add_option("--checkpoint-every", o.checkpoint_every, "steps; 0: each epoch")->capture_default_str();
  app.add_flag("--resume", o.resume, "go on from the newest whole checkpoint of --checkpoint-dir");
  app.add_option("--max-steps", o.max_steps, "stop after this many steps; 0: after the epochs")->capture_default_str();
  app.add_flag("--quiet", o.quiet, "no progress and no table");
  app.set_config("--config", "", "read options from a TOML file; the command line goes first");
}

void require(bool good, const std::string& what, const std::string& next) {
  if (!good) throw UsageError({.what = what, .next = next});
}

}  // namespace

void add_options(CLI::App& app, TrainOptions& options, const Choices& choices) {
  add_data_options(app, options, choices);
  add_strategy_options(app, options);
  add_optimizer_options(app, options);
  add_output_options(app, options);
  app.footer(strategy_table());
}

void check_options(const TrainOptions& o) {
  static_cast<void>(strategy_info(o.strategy));
  require(o.epochs > 0, concat("--epochs ", o.epochs, " is not positive"), "give at least 1");
  require(o.batch_size > 0, concat("--batch-size ", o.batch_size, " is not positive"), "give at least 1");
  require(o.workers >= 0, concat("--workers ", o.workers, " is negative"), "0: the step waits while a batch is loaded");
  require(o.prefetch > 0, concat("--prefetch ", o.prefetch, " is not positive"), "give at least 1");
  require(o.skip_bad >= 0, concat("--skip-bad ", o.skip_bad, " is negative"), "0: a bad sample is an error");
  require(o.lr_base_batch_size > 0, "--lr-base-batch-size is not positive", "give the batch that --lr suits");
  require(std::ranges::all_of(o.devices_per_worker, [](int devices) { return devices >= 1; }),
          "--devices-per-worker with a number below 1", "leave it out: --ranks counts the devices");
  require(o.servers >= 1, concat("--servers ", o.servers), "give at least 1");
  require(o.devices_per_worker.empty() || strategy_info(o.strategy).threads,
          concat("--devices-per-worker with strategy ", o.strategy, ", whose ranks have one device each"),
          "leave it out, or choose a strategy whose devices are threads");
  require(o.average_every >= 1, concat("--average-every ", o.average_every, " is not positive"), "give at least 1");
  require(o.micro_batches >= 1, concat("--micro-batches ", o.micro_batches, " is not positive"), "give at least 1");
  require(o.timeout > 0, concat("--timeout ", o.timeout, " is not positive"), "give seconds, such as 300");
  require(o.threads >= 0, concat("--threads ", o.threads, " is negative"), "give 0 for cores / ranks");
  require(o.checkpoint_every >= 0, concat("--checkpoint-every ", o.checkpoint_every, " is negative"), "0: each epoch");
  require(o.max_steps >= 0, concat("--max-steps ", o.max_steps, " is negative"), "0: after the epochs");
  require(o.lr >= 0, concat("--lr ", o.lr, " is negative"), "give a rate such as 0.05");
  require(o.clip_norm >= 0 && o.clip_value >= 0, "--clip-norm or --clip-value is negative", "0: off");
  require(o.ema_decay >= 0 && o.ema_decay < 1, concat("--ema-decay ", o.ema_decay, " is not in [0, 1)"),
          "such as 0.999");
  require(o.virtual_shards >= 0, concat("--virtual-shards ", o.virtual_shards, " is negative"), "0: off");
  require(o.drop_every_epochs > 0, "--drop-every-epochs is not positive", "give epochs, such as 30");
  require(!o.resume || !o.checkpoint_dir.empty(), "--resume without --checkpoint-dir",
          "name the folder to resume from");
  require(!o.nesterov || o.momentum > 0, "--nesterov without --momentum", "give a momentum such as 0.9");
}

int server_count(const TrainOptions& options) {
  return options.strategy == "kvstore" && has_servers(options.kvstore) ? options.servers : 0;
}

int devices_of_worker(const TrainOptions& options, int worker) {
  const auto& devices = options.devices_per_worker;
  if (devices.empty()) return 0;
  if (devices.size() == 1) return devices.front();
  require(static_cast<std::size_t>(worker) < devices.size(),
          concat("--devices-per-worker has ", devices.size(), " numbers, but there is a worker ", worker),
          "give one number for all workers, or one for each");
  return devices[static_cast<std::size_t>(worker)];
}

int rank_count(const TrainOptions& options) {
  if (options.ranks == "auto") return static_cast<int>(usable_cores().size());
  int ranks = 0;
  require(parse_int(options.ranks, ranks) && ranks > 0, concat("--ranks ", options.ranks, " is not a number of ranks"),
          "give a positive number, or auto for one per core");
  return ranks;
}

}  // namespace lockstep
