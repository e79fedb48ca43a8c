#include "lockstep/train/options.h"

#include <CLI/CLI.hpp>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/strategy/strategy.h"

namespace lockstep {
namespace {

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const StrategyInfo& info : strategies()) names.emplace_back(info.name);
  return names;
}

std::string strategy_table() {
  std::string table = "Strategies:\n";
  for (const StrategyInfo& info : strategies())
    table += concat("  ", info.name, std::string(14 - std::string(info.name).size(), ' '), info.description, "\n");
  return table;
}

void add_data_options(CLI::App& app, TrainOptions& o, const Choices& choices) {
  if (!choices.models.empty())
    app.add_option("--model", o.model, concat("model to train: ", join(choices.models, ", ")))->capture_default_str();
  if (!choices.datasets.empty())
    app.add_option("--data", o.data, concat("dataset to train on, KIND[:PATH][?OPTIONS]: ", join(choices.datasets, ", ")))
        ->capture_default_str();
  app.add_option("--data-dir", o.data_dir, "folder that holds the dataset");
  if (!choices.datasets.empty())
    app.add_option("--augment", o.augment, "transforms of training images, such as crop:4,flip; docs/data.md lists them");
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
  app.add_option("--threads", o.threads, "threads per rank; 0: cores / ranks")->capture_default_str();
  app.add_option("--device", o.device, "where to compute")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--layout", o.layout, "memory order of images")
      ->check(CLI::IsMember({"auto", "contiguous", "channels_last"}))
      ->capture_default_str();
  app.add_option("--timeout", o.timeout, "seconds to wait for another rank")->capture_default_str();
}

void add_optimizer_options(CLI::App& app, TrainOptions& o) {
  app.add_option("--optimizer", o.optimizer, "update rule")
      ->check(CLI::IsMember({"sgd", "adamw"}))
      ->capture_default_str();
  app.add_option("--lr", o.lr, "learning rate")->capture_default_str();
  app.add_option("--momentum", o.momentum, "sgd only")->capture_default_str();
  app.add_flag("--nesterov", o.nesterov, "sgd only");
  app.add_option("--weight-decay", o.weight_decay, "shrinks the weights in each step")->capture_default_str();
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
  const auto names = strategy_names();
  require(std::find(names.begin(), names.end(), o.strategy) != names.end(), concat("no such strategy: ", o.strategy),
          concat("one of ", join(names, ", ")));
  require(o.epochs > 0, concat("--epochs ", o.epochs, " is not positive"), "give at least 1");
  require(o.batch_size > 0, concat("--batch-size ", o.batch_size, " is not positive"), "give at least 1");
  require(o.workers >= 0, concat("--workers ", o.workers, " is negative"), "0: the step waits while a batch is loaded");
  require(o.prefetch > 0, concat("--prefetch ", o.prefetch, " is not positive"), "give at least 1");
  require(o.skip_bad >= 0, concat("--skip-bad ", o.skip_bad, " is negative"), "0: a bad sample is an error");
  require(o.lr_base_batch_size > 0, "--lr-base-batch-size is not positive", "give the batch that --lr suits");
  require(o.timeout > 0, concat("--timeout ", o.timeout, " is not positive"), "give seconds, such as 300");
  require(o.threads >= 0, concat("--threads ", o.threads, " is negative"), "give 0 for cores / ranks");
  require(o.checkpoint_every >= 0, concat("--checkpoint-every ", o.checkpoint_every, " is negative"), "0: each epoch");
  require(o.max_steps >= 0, concat("--max-steps ", o.max_steps, " is negative"), "0: after the epochs");
  require(o.lr >= 0, concat("--lr ", o.lr, " is negative"), "give a rate such as 0.05");
  require(o.drop_every_epochs > 0, "--drop-every-epochs is not positive", "give epochs, such as 30");
  require(!o.resume || !o.checkpoint_dir.empty(), "--resume without --checkpoint-dir", "name the folder to resume from");
  require(!o.nesterov || o.momentum > 0, "--nesterov without --momentum", "give a momentum such as 0.9");
}

int rank_count(const TrainOptions& options) {
  if (options.ranks == "auto") return static_cast<int>(usable_cores().size());
  int ranks = 0;
  require(parse_int(options.ranks, ranks) && ranks > 0, concat("--ranks ", options.ranks, " is not a number of ranks"),
          "give a positive number, or auto for one per core");
  return ranks;
}

}  // namespace lockstep
