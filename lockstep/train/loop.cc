// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/loop.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/operator_spans.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/observe/trace.h"
#include "lockstep/schedule.h"
#include "lockstep/stop.h"
#include "lockstep/strategy/option_names.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/state/snapshot.h"

namespace lockstep {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kStepsThatTell = 20;

ScheduleOptions schedule_in_steps(const TrainOptions& options, int64_t steps_per_epoch) {
  const LearningRateOptions& rate = options.learning_rate;
  const auto steps = static_cast<double>(steps_per_epoch);
  return {.kind = rate.schedule,
          .warmup_steps = rate.warmup_epochs * steps,
          .total_steps = static_cast<double>(options.epochs) * steps,
          .floor = rate.floor,
          .drop_every = rate.drop_every_epochs * steps,
          .drop_factor = rate.drop_factor};
}

// Samples of a step.
int64_t step_samples(const TrainOptions& options) { return options.loader.batch_size * options.strategy.accumulate; }

// --lr, scaled to the batch.
double base_learning_rate(const TrainOptions& options) {
  const double lr = values_of(options.strategy.optimizer).at("lr");
  const LearningRateOptions& rate = options.learning_rate;
  return scaled_learning_rate(lr, rate.scaling, step_samples(options), rate.base_batch_size);
}

LoaderOptions loader_options(const TrainOptions& options) {
  LoaderOptions loader = options.loader;
  loader.seed = options.strategy.seed;
  return loader;
}

LoaderOptions training_loader(const TrainOptions& options, bool has_data) {
  LoaderOptions loader = loader_options(options);
  loader.batch_size = step_samples(options);
  loader.empty = !has_data;
  return loader;
}

LoaderPlace loader_place(const World& world, const Strategy& strategy) {
  return {world.rank(), world.size(), world.device(), world.cores(), strategy.prefetches()};
}

std::vector<std::string> device_names(const Strategy& strategy) {
  return strategy.devices() == nullptr ? std::vector<std::string>() : strategy.devices()->names();
}

NamedTensors gradients_of(const torch::nn::Module& model) {
  NamedTensors gradients;
  for (const auto& [name, parameter] : named_parameters(model))
    if (parameter.grad().defined()) gradients.push_back({name, parameter.grad()});
  return gradients;
}

std::string headline(const World& world, const Loader& loader, const std::vector<std::string>& devices,
                     const TrainOptions& options) {
  return concat(options.model, " on ", loader.dataset().name(), ": ", strategy_info(options.strategy.kind).name, ", ",
                world.size(), world.size() == 1 ? " rank" : " ranks", " on ",
                devices.empty() ? world.device().str() : join(devices, " "), ", batch ", step_samples(options), ", ",
                name_of(options.strategy.optimizer), " lr ", base_learning_rate(options), ", ",
                name_of(options.learning_rate.schedule));
}

}  // namespace

TrainingLoop::TrainingLoop(const World& world, const Task& task, const Datasets& datasets, Strategy& strategy,
                           const TrainOptions& options)
    : world_(world),
      step_world_(strategy.ranks(world).step),
      task_(task),
      validation_(datasets.validation),
      strategy_(strategy),
      options_(options),
      loader_(loader_place(strategy.ranks(world).data, strategy), datasets.train,
              training_loader(options, strategy.ranks(world).has_data)),
      timeline_(world, options.trace, parse_steps(options.trace_steps)),
      keeper_(world, step_world_, strategy, options_, metrics_, task.on_checkpoint),
      progress_(world.rank() == 0 && !options.quiet),
      last_epoch_{{"train_loss", kNaN}, {"val_accuracy", kNaN}} {
  require(validation_ || (!options.keep_best && options.patience == 0),
          "--keep-best and --patience compare validation losses, but there is no validation set",
          "give the data one, such as ?val=0.1 (docs/data.md), or leave the option out");
  if (world.rank() == 0 && !options.metrics.empty())  // after the keeper has looked for checkpoints of another run
    metrics_ = MetricsFile(options.metrics, options.resume);
  if (world.rank() == 0 && !options.on_event.empty()) metrics_.pass_on_to(options.on_event);
  position_ = keeper_.begin();
  name_modules(named_parameters(strategy.model()));
}

Json TrainingLoop::run() {
  observe::enter(Phase::kOwnCode);
  const Stopwatch watch;
  progress_.begin_run(headline(world_, loader_, device_names(strategy_), options_),
                      {options_.epochs, loader_.steps_per_epoch(), last_step()});
  metrics_.write(start_event(options_, position_.step));
  while (has_more() && !stopped_) train_epoch();
  const bool saved = keeper_.save_last(position_);
  const Json run = stopped_ ? leave_early(watch.seconds(), saved) : summary(watch.seconds());
  metrics_.write(run);
  timeline_.finish(/*together=*/step_world_.size() == world_.size());
  if (!stopped_) progress_.end_run(run, strategy_.table());
  keeper_.require_saved(position_, saved);
  stopped_ ? static_cast<void>(metrics_.finish()) : metrics_.require_written();  // a job that was stopped starts again
  return run;
}

// Tells whether steps are left, or an epoch that is not validated yet.
bool TrainingLoop::has_more() const {
  return (position_.step < last_step() && has_patience()) || position_.step_in_epoch == loader_.steps_per_epoch();
}

bool TrainingLoop::has_patience() const {
  return options_.patience == 0 || position_.best_epoch < 0 ||
         position_.epoch - 1 - position_.best_epoch < options_.patience;
}

void TrainingLoop::train_epoch() {
  progress_.begin_epoch(position_);
  const LoadingStatistics before = loader_.statistics();
  const Stopwatch epoch;
  Stopwatch since_last_step;
  const Loader::Epoch batches = loader_.epoch(position_.epoch, position_.step_in_epoch);
  const bool ahead = strategy_.prefetches();
  observe::begin_step(position_.step);
  for (auto next = batches.begin(); next != batches.end();) {
    Batch batch = std::move(*next);
    if (ahead && ++next != batches.end()) strategy_.prefetch(*next);
    train_step(batch, since_last_step);
    if (ends_here()) break;
    since_last_step = Stopwatch();
    batch = {};  // its memory serves a later one
    if (position_.step_in_epoch < loader_.steps_per_epoch()) observe::begin_step(position_.step);
    if (!ahead) ++next;
  }
  hint_at_loading(before, epoch.seconds());
  if (position_.step_in_epoch == loader_.steps_per_epoch() && !stopped_) finish_epoch();
}

// Between two steps.
bool TrainingLoop::ends_here() {
  const FaultScope between(Phase::kOwnCode);
  if (position_.step >= last_step()) return true;
  stopped_ = stop_requested();
  return stopped_;
}

// One step. All ranks of step_world_ take it together: forward_backward() exchanges gradients and returns the same totals
// on all of them, so all agree whether to go on.
void TrainingLoop::train_step(const Batch& batch, const Stopwatch& since_last_step) {
  timeline_.begin_step(position_.step);
  const trace::Span span("step", position_.step);
  const BatchTotals totals = strategy_.forward_backward(batch);
  require_finite_loss(totals);
  set_learning_rate(strategy_.optimizer(), learning_rate(position_.step));
  const double so_far = since_last_step.seconds();
  keeper_.before_update(after_step(totals, so_far), step_event(totals, so_far));
  strategy_.update();
  const Json event = step_event(totals, since_last_step.seconds());
  record_step(totals, event);
  keeper_.after_update(position_, event);
}

// Checks before the update, so that parameters and checkpoints stay good.
void TrainingLoop::require_finite_loss(const BatchTotals& totals) const {
  if (std::isfinite(totals.mean_loss)) return;
  std::string first = first_non_finite(named_parameters(strategy_.model()));
  std::string where = "parameter ";
  if (first.empty()) {
    first = first_non_finite(gradients_of(strategy_.model()));
    where = "gradient of ";
  }
  throw NonFiniteError(
      {.what = concat("the loss is ", totals.mean_loss, " at step ", position_.step, " (epoch ", position_.epoch, "); ",
                      first.empty() ? "all parameters and gradients are finite"
                                    : concat("the first that is not finite is the ", where, first)),
       .here = world_.describe(),
       .likely = "a learning rate that is too high, or a sample with values that are not finite",
       .next = options_.checkpoint_dir.empty() ? "try a lower --lr or --warmup-epochs" : kLowerRate});
}

double TrainingLoop::learning_rate(int64_t step) const {
  return base_learning_rate(options_) * schedule_factor(schedule_in_steps(options_, loader_.steps_per_epoch()), step);
}

Json TrainingLoop::step_event(const BatchTotals& totals, double seconds) const {
  return {{"event", "step"},
          {"epoch", position_.epoch},
          {"step", position_.step},  // since the start of the run, from 0
          {"loss", totals.mean_loss},
          {"seconds", seconds},
          {"samples", totals.examples},
          {"learning_rate", learning_rate(position_.step)}};
}

Position TrainingLoop::after_step(const BatchTotals& totals, double seconds) const {
  Position next = position_;
  ++next.step;
  ++next.step_in_epoch;
  next.samples += totals.examples;
  next.epoch_loss += totals.mean_loss * static_cast<double>(totals.samples);
  next.epoch_samples += totals.examples;
  next.epoch_surplus += totals.samples - totals.examples;
  next.epoch_seconds += seconds;
  return next;
}

void TrainingLoop::record_step(const BatchTotals& totals, const Json& event) {
  observe::finish_step(totals.examples, totals.mean_loss);
  metrics_.write(event);
  position_ = after_step(totals, event["seconds"]);
  progress_.step(position_, totals.mean_loss);
  if (task_.on_step)
    task_.on_step({.step = event["step"],
                   .epoch = event["epoch"],
                   .loss = totals.mean_loss,
                   .learning_rate = event["learning_rate"],
                   .samples = totals.examples,
                   .seconds = event["seconds"]},
                  strategy_.model());
}

// ---- around the steps

// No rank ends before the checkpoint is written: a launcher might end the others.
Json TrainingLoop::leave_early(double seconds, bool saved) {
  step_world_.barrier();
  if (world_.rank() == 0)
    log_warning(concat("stopped after step ", position_.step, " of ", last_step(), ", as asked by a signal; ",
                       options_.checkpoint_dir.empty() ? "nothing is saved: there is no --checkpoint-dir"
                       : saved                         ? "--resume goes on from here"
                                                       : "its checkpoint is not saved"));
  Json event = summary(seconds);
  event.update({{"event", "stop"}, {"step", position_.step}, {"saved", saved}});
  return event;
}

// Warns once a run that steps wait for data. Not before kStepsThatTell: the first steps wait for the first batches.
void TrainingLoop::hint_at_loading(const LoadingStatistics& before, double seconds) {
  const LoadingStatistics now = loader_.statistics() - before;
  if (world_.rank() != 0 || hinted_ || now.batches < kStepsThatTell) return;
  const std::string hint = loader_.hint(now, seconds);
  hinted_ = !hint.empty();
  if (hinted_) log_warning(hint);
}

// The number of steps of the whole run.
int64_t TrainingLoop::last_step() const {
  const int64_t all = options_.epochs * loader_.steps_per_epoch();
  return options_.max_steps > 0 ? std::min(all, options_.max_steps) : all;
}

void TrainingLoop::finish_epoch() {
  const trace::Span span("end of epoch", position_.epoch);
  Evaluation found{.loss = kNaN, .accuracy = kNaN};
  if (validation_ && takes_part(step_world_, world_))
    found = evaluate(step_world_, task_, strategy_, validation_, loader_options(options_));
  last_epoch_ = epoch_event(found);
  metrics_.write(last_epoch_);
  progress_.end_epoch(last_epoch_);
  const Position& p = position_;
  if (task_.on_epoch)
    task_.on_epoch({.epoch = p.epoch,
                    .step = p.step - 1,
                    .loss = last_epoch_["train_loss"],
                    .learning_rate = learning_rate(p.step - 1),
                    .samples = p.epoch_samples,
                    .seconds = p.epoch_seconds,
                    .validation = found},
                   strategy_.model());
  const bool is_best = p.best_epoch < 0 ? std::isfinite(found.loss) : found.loss < p.best_loss;
  position_ = {.epoch = p.epoch + 1,
               .step = p.step,
               .samples = p.samples,
               .best_epoch = is_best ? p.epoch : p.best_epoch,
               .best_step = !is_best             ? p.best_step
                            : options_.keep_best ? p.step
                                                 : -1,
               .best_loss = is_best ? found.loss : p.best_loss};
  if (options_.checkpoint_every == 0 || (options_.keep_best && is_best)) keeper_.save(position_);
  if (!has_patience() && world_.rank() == 0)
    log_info(concat("no lower validation loss in ", options_.patience, " epochs: training ends after epoch ",
                    position_.epoch));
}

Json TrainingLoop::epoch_event(const Evaluation& found) const {
  const auto samples = static_cast<double>(position_.epoch_samples);
  const auto surplus = static_cast<double>(position_.epoch_surplus);
  Json event = {{"event", "epoch"},
                {"epoch", position_.epoch},
                {"seconds", position_.epoch_seconds},  // training alone, without validation
                {"samples", position_.epoch_samples},
                {"samples_per_second", samples / position_.epoch_seconds},
                {"train_loss", position_.epoch_loss / (samples + surplus)}};
  add_evaluation(event, "val_", found);
  return event;
}

Json TrainingLoop::summary(double seconds) const {
  const PhaseTimes& phases = strategy_.phases();
  const LoadingStatistics loading = loader_.statistics();
  const auto devices = device_names(strategy_);
  Json run = {{"event", "run"},
              {"strategy", strategy_info(options_.strategy.kind).name},
              {"model", options_.model},
              {"data", loader_.dataset().name()},
              {"ranks", world_.size() * std::max(std::ssize(devices), ptrdiff_t{1})},  // or devices of all
              {"devices", devices.empty() ? std::vector<std::string>{world_.device().str()} : devices},
              {"epochs", position_.epoch},
              {"steps", position_.step},
              {"samples", position_.samples},
              {"seconds", seconds},
              {"train_loss", last_epoch_.at("train_loss")},
              {"val_accuracy", last_epoch_.at("val_accuracy")},
              {"data_seconds", loading.wait},  // of rank 0, added up over the steps, like those below
              {"data_read_seconds", loading.read},
              {"data_assemble_seconds", loading.assemble},
              {"data_copy_seconds", loading.copy},
              {"data_room_seconds", loading.room},
              {"data_queue_depth", loading.mean_queued()},
              {"data_skipped", loading.skipped},
              {"forward_seconds", phases.forward},
              {"backward_seconds", phases.backward},
              {"exchange_seconds", phases.exchange},
              {"update_seconds", phases.update},
              {"each_rank", facts_of_each_rank(step_world_, world_, phases, loading.wait)}};
  for (const auto& [name, value] : strategy_.report()) run[name] = value;
  return run;
}

}  // namespace lockstep
