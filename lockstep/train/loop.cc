// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/loop.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/base/trace.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/collective/operator_spans.h"
#include "lockstep/error.h"
#include "lockstep/launch/fault.h"
#include "lockstep/launch/own_progress.h"
#include "lockstep/model/parameters.h"
#include "lockstep/schedule.h"
#include "lockstep/stop.h"
#include "lockstep/strategy/option_names.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/in_place_state.h"
#include "lockstep/train/run_facts.h"
#include "lockstep/train/snapshot.h"

namespace lockstep {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kStepsThatTell = 20;
constexpr double kShareForKeeping = 0.01;

ScheduleOptions schedule_in_steps(const TrainOptions& options, std::int64_t steps_per_epoch) {
  const LearningRateOptions& rate = options.learning_rate;
  const auto steps = static_cast<double>(steps_per_epoch);
  return {.kind = rate.schedule,
          .warmup_steps = rate.warmup_epochs * steps,
          .total_steps = static_cast<double>(options.epochs) * steps,
          .drop_every = rate.drop_every_epochs * steps,
          .drop_factor = rate.drop_factor};
}

// --lr, scaled to the batch.
double base_learning_rate(const TrainOptions& options) {
  const double lr = values_of(options.strategy.optimizer).at("lr");
  const LearningRateOptions& rate = options.learning_rate;
  return scaled_learning_rate(lr, rate.scaling, options.loader.batch_size, rate.base_batch_size);
}

LoaderOptions loader_options(const TrainOptions& options, bool has_data = true) {
  LoaderOptions loader = options.loader;
  loader.seed = options.strategy.seed;
  loader.empty = !has_data;
  return loader;
}

LoaderPlace loader_place(const World& world, const Strategy& strategy) {
  return {world.rank(), world.size(), world.device(), world.cores(), strategy.prefetches()};
}

std::vector<std::string> device_names(const Strategy& strategy) {
  return strategy.devices() == nullptr ? std::vector<std::string>() : strategy.devices()->names();
}

std::vector<NamedTensor> gradients_of(const torch::nn::Module& model) {
  std::vector<NamedTensor> gradients;
  for (const auto& [name, parameter] : named_parameters(model))
    if (parameter.grad().defined()) gradients.push_back({name, parameter.grad()});
  return gradients;
}

std::string headline(const World& world, const Loader& loader, const std::vector<std::string>& devices,
                     const TrainOptions& options) {
  return concat(options.model, " on ", loader.dataset().name(), ": ", strategy_info(options.strategy.kind).name, ", ",
                world.size(), world.size() == 1 ? " rank" : " ranks", " on ",
                devices.empty() ? world.device().str() : join(devices, " "), ", batch ", options.loader.batch_size,
                ", ", name_of(options.strategy.optimizer), " lr ", base_learning_rate(options), ", ",
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
              loader_options(options, strategy.ranks(world).has_data)),
      timeline_(world, options.trace, parse_steps(options.trace_steps)),
      progress_(world.rank() == 0 && !options.quiet),
      last_epoch_{{"train_loss", kNaN}, {"val_accuracy", kNaN}} {
  if (world.rank() == 0) {
    if (!options.checkpoint_dir.empty()) open_checkpoints();
    if (!options.tensorboard.empty()) curves_ = Curves(options);
    if (!options.metrics.empty()) metrics_ = MetricsFile(options.metrics, options.resume);
  }
  if (JobMemory* const memory = JobMemory::get(); memory != nullptr && step_world_.size() == world.size()) {
    in_place_ = InPlaceState::of(*memory, world_, strategy_, options_);
    if (!in_place_) kept_.emplace(step_world_, *memory, kShareForKeeping, is_in_parts(strategy_));
  }
  if (go_on_from_memory()) {
    if (checkpoints_) checkpoints_->folder().take_over();
  } else if (options.resume) {
    resume();
  }
  begin_to_keep();
  name_modules(named_parameters(strategy.model()));
}

TrainingLoop::~TrainingLoop() = default;

Json TrainingLoop::run() {
  own_progress::enter(Phase::kOwnCode);
  const Stopwatch watch;
  progress_.begin_run(headline(world_, loader_, device_names(strategy_), options_),
                      {options_.epochs, loader_.steps_per_epoch(), last_step()});
  metrics_.write(start_event(options_, position_.step));
  curves_.begin_run(position_.step, options_, ranks());
  while (has_more() && !stopped_) train_epoch();
  const bool saved = save_last_checkpoint();
  record_saved();
  const Json run = stopped_ ? leave_early(watch.seconds(), saved) : summary(watch.seconds());
  metrics_.write(run);
  timeline_.finish(/*together=*/step_world_.size() == world_.size());
  if (!stopped_) {
    curves_.end_run(position_.step);
    progress_.end_run(run, strategy_.table());
  }
  require_saved(saved);
  require_recorded();
  return run;
}

// Also after the last step of an epoch, until it is validated.
bool TrainingLoop::has_more() const {
  return position_.step < last_step() || position_.step_in_epoch == loader_.steps_per_epoch();
}

void TrainingLoop::train_epoch() {
  progress_.begin_epoch(position_);
  const LoadingStatistics before = loader_.statistics();
  const Stopwatch epoch;
  Stopwatch since_last_step;
  const Loader::Epoch batches = loader_.epoch(position_.epoch, position_.step_in_epoch);
  const bool ahead = strategy_.prefetches();
  own_progress::begin_step(position_.step);
  for (auto next = batches.begin(); next != batches.end();) {
    Batch batch = std::move(*next);
    if (ahead && ++next != batches.end()) strategy_.prefetch(*next);
    train_step(batch, since_last_step);
    if (ends_here()) break;
    since_last_step = Stopwatch();
    batch = {};  // its memory serves a later one
    if (position_.step_in_epoch < loader_.steps_per_epoch()) own_progress::begin_step(position_.step);
    if (!ahead) ++next;
  }
  hint_at_loading(before, epoch.seconds());
  if (position_.step_in_epoch == loader_.steps_per_epoch() && !stopped_) finish_epoch();
}

// Between two steps.
bool TrainingLoop::ends_here() {
  const fault::During between(Phase::kOwnCode);
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
  curves_.add_histograms(strategy_.model(), position_.step);
  set_learning_rate(strategy_.optimizer(), learning_rate());
  keep_own_state(totals, since_last_step.seconds());
  strategy_.update();
  record_step(totals, since_last_step.seconds());
  make_room_to_save();
  keep_state();
  if (options_.checkpoint_every > 0 && position_.step % options_.checkpoint_every == 0) save_checkpoint();
}

// Before the update, so that parameters and checkpoints stay good.
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

double TrainingLoop::learning_rate() const {
  return base_learning_rate(options_) *
         schedule_factor(schedule_in_steps(options_, loader_.steps_per_epoch()), position_.step);
}

Json TrainingLoop::step_event(const BatchTotals& totals, double seconds) const {
  return {{"event", "step"},          {"epoch", position_.epoch},
          {"step", position_.step},  // since the start of the run, from 0
          {"loss", totals.mean_loss}, {"seconds", seconds},
          {"samples", totals.samples}};
}

Position TrainingLoop::after_step(const BatchTotals& totals, double seconds) const {
  Position next = position_;
  ++next.step;
  ++next.step_in_epoch;
  next.samples += totals.samples;
  next.epoch_loss += totals.mean_loss * static_cast<double>(totals.samples);
  next.epoch_samples += totals.samples;
  next.epoch_seconds += seconds;
  return next;
}

void TrainingLoop::record_step(const BatchTotals& totals, double seconds) {
  Json event = step_event(totals, seconds);
  own_progress::finish_step(totals.samples, totals.mean_loss);
  metrics_.write(event);
  if (kept_) last_event_ = event.dump();
  record_saved();
  event["learning_rate"] = learning_rate();
  curves_.add(event, position_.step);
  position_ = after_step(totals, seconds);
  progress_.step(position_, totals.mean_loss);
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
  Json event = {{"event", "stop"}, {"step", position_.step}, {"saved", saved}};
  const Json totals = summary(seconds);
  for (const auto& [name, value] : totals.items())
    if (name != "event") event[name] = value;
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
std::int64_t TrainingLoop::last_step() const {
  const std::int64_t all = options_.epochs * loader_.steps_per_epoch();
  return options_.max_steps > 0 ? std::min(all, options_.max_steps) : all;
}

void TrainingLoop::finish_epoch() {
  const trace::Span span("end of epoch", position_.epoch);
  Evaluation found{.loss = kNaN, .accuracy = kNaN};
  if (validation_ && !stands_aside())
    found = evaluate(step_world_, task_, strategy_, validation_, loader_options(options_));
  const Position& p = position_;
  const auto samples = static_cast<double>(p.epoch_samples);
  last_epoch_ = {{"event", "epoch"},
                 {"epoch", p.epoch},
                 {"seconds", p.epoch_seconds},  // training alone, without validation
                 {"samples", p.epoch_samples},
                 {"samples_per_second", samples / p.epoch_seconds},
                 {"train_loss", p.epoch_loss / samples},
                 {"val_loss", found.loss},
                 {"val_accuracy", found.accuracy}};
  metrics_.write(last_epoch_);
  curves_.add(last_epoch_, p.step - 1);  // at the last step of the epoch: a resumed run draws the one after it
  progress_.end_epoch(last_epoch_);
  position_ = {.epoch = p.epoch + 1, .step = p.step, .samples = p.samples};
  if (options_.checkpoint_every == 0) save_checkpoint();
}

// Where each rank steps at its own pace (asynchronous servers), rank 0 validates and saves for all.
bool TrainingLoop::stands_aside() const { return step_world_.size() < world_.size() && world_.rank() != 0; }

// With the devices of each, where a rank has several.
std::int64_t TrainingLoop::ranks() const {
  return world_.size() * std::max(std::ssize(device_names(strategy_)), std::ptrdiff_t{1});
}

// As often as that takes at most kShareForKeeping of the time; after a loss the steps since then are repeated.
void TrainingLoop::keep_state() {
  if (!kept_ || !strategy_.is_one_model() || !kept_->is_due()) return;
  const trace::Span span("keep the state", position_.step);
  metrics_.hand_over();
  KeptParts parts = parts_to_keep(step_world_, strategy_, position_, options_);
  parts.common.metadata[kLastStep] = last_event_;
  kept_->keep(position_.step, parts.common, parts.own);
}

void TrainingLoop::keep_own_state(const BatchTotals& totals, double seconds) {
  if (!in_place_) return;
  metrics_.hand_over();
  in_place_->publish(after_step(totals, seconds), step_event(totals, seconds).dump());
}

void TrainingLoop::save_checkpoint() {
  if (options_.checkpoint_dir.empty() || stands_aside()) return;
  const trace::Span span("checkpoint", position_.step);
  const own_progress::During saving(Phase::kSaving);
  require_finite_everywhere(step_world_, strategy_, position_);
  const Snapshot snapshot = take_snapshot(step_world_, strategy_, position_, options_);
  checkpoints_ ? checkpoints_->save(position_.step, snapshot.file, snapshot.fetch) : snapshot.send();
}

// After the first step, when the optimizer has its state: then the first save takes no longer than others. All ranks that save
// count, because slices of the optimizer's state are gathered from them.
void TrainingLoop::make_room_to_save() {
  if (options_.checkpoint_dir.empty() || stands_aside() || std::exchange(has_room_to_save_, true)) return;
  const std::size_t bytes = snapshot_bytes(strategy_);
  if (checkpoints_ && bytes > 0) checkpoints_->reserve(bytes);
}

void TrainingLoop::record_saved() {
  if (!checkpoints_) return;
  for (const auto& [step, seconds] : checkpoints_->take_saved())
    metrics_.write({{"event", "checkpoint"}, {"step", step}, {"seconds", seconds}});
}

// Whether rank 0 has the present state on the disk, which it waits for. Half of the timeout is for the disk, so that ranks
// that wait for rank 0 do not take it for lost.
bool TrainingLoop::is_saved() {
  const own_progress::During saving(Phase::kSaving);
  const bool mine = checkpoints_ && checkpoints_->finish(position_.step, options_.strategy.timeout / 2);
  const torch::Tensor saved = torch::tensor({mine ? 1 : 0}, torch::kInt32);
  step_world_.broadcast(saved);
  return saved.item<int>() != 0;
}

bool TrainingLoop::save_last_checkpoint() {
  if (options_.checkpoint_dir.empty() || stands_aside()) return false;
  if (position_.step == resumed_step_ || is_saved()) return true;
  save_checkpoint();
  return is_saved();
}

void TrainingLoop::require_saved(bool saved) const {
  if (saved || !checkpoints_) return;
  throw SystemError(
      {.what = concat("the checkpoint of the last step, ", position_.step, ", is not saved: ", checkpoints_->trouble()),
       .here = options_.checkpoint_dir,
       .likely = "a full disk, or one that does not answer",
       .next = "mend that, and --resume goes on from the newest checkpoint there"});
}

// Of a job that was asked to stop, lost metrics are a warning: it ends as its scheduler wants it, and is started again.
void TrainingLoop::require_recorded() { stopped_ ? static_cast<void>(metrics_.finish()) : metrics_.require_written(); }

void TrainingLoop::open_checkpoints() {
  checkpoints_.emplace(CheckpointFolder(options_.checkpoint_dir, /*keep=*/2, to_size(options_.checkpoint_shard_bytes)));
  if (!options_.resume && !checkpoints_->folder().empty())
    throw CheckpointError({.what = concat(options_.checkpoint_dir, " holds checkpoints of another run"),
                           .likely = "the same command as before, without --resume",
                           .next = "give --resume to go on with that run, or name another --checkpoint-dir"});
}

void TrainingLoop::require_checkpoint() const {
  if (!options_.checkpoint_dir.empty()) return;
  throw UsageError({.what = "a part of the model was lost with its machine, and there is no checkpoint",
                    .here = world_.describe(),
                    .likely = "a pipeline: each machine keeps the stages of its own ranks in memory, and no others",
                    .next =
                        "give --checkpoint-dir, on a disk that all machines see: then the job goes on from its last "
                        "checkpoint"});
}

// After the loss of a rank. False: nothing was kept, or it is incomplete and there are checkpoints. The event of the last step is written once more where it may be missing.
bool TrainingLoop::go_on_from_memory() {
  std::string last_step;
  if (in_place_) {
    const auto found = in_place_->take_over();
    if (!found) return false;
    position_ = found->position;
    last_step = found->last_step;
  } else {
    if (!kept_ || kept_->found() == nullptr) return false;
    const auto position = restore_parts(*kept_->found(), world_, strategy_, options_);
    if (!position) {
      require_checkpoint();
      kept_->drop_found();
      return false;
    }
    position_ = *position;
    last_step = kept_->found()->common.metadata().at(kLastStep);
  }
  metrics_.write({{"event", "resume"}, {"step", position_.step}});
  if (!last_step.empty()) metrics_.write(Json::parse(last_step));
  if (in_place_ && world_.rank() == 0) log_info(concat("a rank was replaced: going on at step ", position_.step));
  return true;
}

void TrainingLoop::begin_to_keep() {
  if (in_place_) return in_place_->begin(position_);
  if (!kept_) return;
  const bool is_kept = kept_->found() != nullptr;
  kept_->taken();
  if (!is_kept) keep_state();
}

// Rank 0 finds and verifies the newest file.
void TrainingLoop::resume() {
  if (checkpoints_ && options_.from_step > 0) checkpoints_->folder().go_back(options_.from_step);
  auto newest = checkpoints_ ? checkpoints_->folder().load_newest() : std::nullopt;
  SharedCheckpoint file(world_, newest);
  if (!file.is_there()) {
    if (checkpoints_) log_info(concat("nothing to resume in ", options_.checkpoint_dir, ": starting at step 0"));
    return;
  }
  position_ = restore_snapshot(file, world_, strategy_, options_);
  resumed_step_ = position_.step;
  metrics_.write({{"event", "resume"}, {"step", position_.step}});
  if (checkpoints_) log_info(concat("resuming from ", newest->path.string(), " at step ", position_.step));
}

Json TrainingLoop::summary(double seconds) const {
  const PhaseTimes& phases = strategy_.phases();
  const LoadingStatistics loading = loader_.statistics();
  const auto devices = device_names(strategy_);
  Json run = {{"event", "run"},
              {"strategy", strategy_info(options_.strategy.kind).name},
              {"model", options_.model},
              {"data", loader_.dataset().name()},
              {"ranks", ranks()},
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
