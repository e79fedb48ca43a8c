// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/state/state_keeper.h"

#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/observe/trace.h"
#include "lockstep/train/state/snapshot.h"

namespace lockstep {
namespace {

constexpr double kShareForCopies = 0.01;  // of the time; after a loss the steps since the last copy are repeated

}  // namespace

bool takes_part(const World& step_world, const World& world) {
  return step_world.size() == world.size() || world.rank() == 0;
}

StateKeeper::StateKeeper(const World& world, const World& step_world, Strategy& strategy, const TrainOptions& options,
                         MetricsFile& metrics, std::function<void(const CheckpointEvent&)> on_checkpoint)
    : world_(world),
      step_world_(step_world),
      strategy_(strategy),
      options_(options),
      metrics_(metrics),
      on_checkpoint_(std::move(on_checkpoint)) {
  if (world.rank() != 0 || options.checkpoint_dir.empty()) return;
  checkpoints_.emplace(CheckpointFolder(options.checkpoint_dir, /*keep=*/2, to_size(options.checkpoint_shard_bytes)));
  if (!options.resume && !checkpoints_->folder().empty())
    throw CheckpointError({.what = concat(options.checkpoint_dir, " holds checkpoints of another run"),
                           .next = "give --resume to go on with that run, or name another --checkpoint-dir"});
}

Position StateKeeper::begin() {
  // What is in place is kept before the update, which changes the strategy's own state: there must be none.
  if (JobMemory* const memory = JobMemory::get(); memory != nullptr && step_world_.size() == world_.size())
    kept_.emplace(step_world_, *memory, kShareForCopies, is_in_parts(strategy_),
                  strategy_.state().empty() ? &strategy_.optimizer() : nullptr);
  std::optional<Position> found = restore_from_memory();
  if (found && checkpoints_) checkpoints_->folder().take_over();
  if (!found && options_.resume) found = restore_checkpoint();
  if (found) metrics_.write({{"event", "resume"}, {"step", found->step}});
  if (!last_event_.empty()) metrics_.write(Json::parse(last_event_));  // once more: it may be missing
  const Position position = found.value_or(Position{});
  if (!kept_) return position;
  // Images that were found are whole without this World's own, which would need the slots of older ones.
  const bool has_images = kept_->found() != nullptr && !kept_->in_place();
  if (!kept_->taken(position.step) && !has_images) keep(position, last_event_);
  return position;
}

// Returns nothing where nothing was kept, or where it is incomplete and there are checkpoints.
std::optional<Position> StateKeeper::restore_from_memory() {
  if (!kept_ || kept_->found() == nullptr) return {};
  const auto position = restore_parts(*kept_->found(), world_, strategy_, options_);
  if (!position) {
    if (options_.checkpoint_dir.empty())
      throw UsageError(
          {.what = "a part of the model was lost with its machine, and there is no checkpoint",
           .here = world_.describe(),
           .likely = "a pipeline: each machine keeps the stages of its own ranks alone",
           .next = "give --checkpoint-dir, on a disk that all machines see, to go on from its last checkpoint"});
    kept_->drop_found();
    return {};
  }
  last_event_ = kept_->found()->own.metadata().at(kLastStep);
  return position;
}

// Rank 0 finds and verifies the newest file.
std::optional<Position> StateKeeper::restore_checkpoint() {
  if (checkpoints_ && options_.from_step > 0) checkpoints_->folder().go_back(options_.from_step);
  auto newest = checkpoints_ ? checkpoints_->folder().load_newest() : std::nullopt;
  const auto saved = share_checkpoint(world_, newest);
  if (!saved) {
    if (checkpoints_) log_info(concat("nothing to resume in ", options_.checkpoint_dir, ": starting at step 0"));
    return {};
  }
  const Position position = restore_snapshot(*saved, world_, strategy_, options_);
  resumed_step_ = position.step;
  if (checkpoints_) log_info(concat("resuming from ", newest->path.string(), " at step ", position.step));
  return position;
}

void StateKeeper::before_update(const Position& next, const Json& event) {
  if (kept_ && kept_->in_place()) keep(next, event.dump());
}

void StateKeeper::after_update(const Position& now, const Json& event) {
  record_saved();
  report_saved();
  if (kept_ && !kept_->in_place()) keep(now, event.dump());
  if (options_.checkpoint_every > 0 && now.step % options_.checkpoint_every == 0) save(now);
}

// Copies the state now and then; in place what each rank has for itself, each time.
void StateKeeper::keep(const Position& position, const std::string& last_event) {
  if (!strategy_.is_one_model() || !kept_->is_due()) return;
  const trace::Span span("keep the state", position.step);
  metrics_.hand_over();
  StateParts parts = state_parts(step_world_, strategy_, position, options_, kept_->in_place());
  parts.own.metadata[kLastStep] = last_event;
  kept_->keep(position.step, parts.common, parts.own);
}

bool StateKeeper::saves() const { return !options_.checkpoint_dir.empty() && takes_part(step_world_, world_); }

void StateKeeper::save(const Position& now) {
  if (!saves()) return;
  const PhaseScope saving(Phase::kSaving, "checkpoint", now.step);
  require_finite_everywhere(step_world_, strategy_, now);
  if (checkpoints_ && options_.keep_best) checkpoints_->keep_also(now.best_step);
  const Snapshot snapshot = take_snapshot(step_world_, strategy_, now, options_);
  checkpoints_ ? checkpoints_->save(now.step, snapshot.file, snapshot.fetch) : snapshot.send();
  if (on_checkpoint_) awaited_ = now.step;
}

void StateKeeper::record_saved() {
  if (!checkpoints_) return;
  for (const auto& [step, seconds, path] : checkpoints_->take_saved()) {
    metrics_.write({{"event", "checkpoint"}, {"step", step}, {"seconds", seconds}});
    if (on_checkpoint_) written_.push_back({step, path});
  }
}

// Tells all ranks what rank 0 has saved.
void StateKeeper::report_saved() {
  if (awaited_ < 0) return;
  const std::string mine = std::exchange(written_, Json::array()).dump();
  for (const Json& each : Json::parse(step_world_.exchange_texts(mine).front())) {
    const CheckpointEvent event{.step = each[0], .path = each[1]};
    if (event.step == awaited_) awaited_ = -1;
    on_checkpoint_(event);
  }
}

// Tells whether rank 0 has this state on the disk, which it waits for. Half of the timeout is for the disk, so that ranks that wait
// for rank 0 do not take it for lost.
bool StateKeeper::is_saved(const Position& now) {
  const PhaseScope saving(Phase::kSaving);
  const bool mine = checkpoints_ && checkpoints_->finish(now.step, options_.strategy.timeout / 2);
  const Tensor saved = torch::tensor({mine ? 1 : 0}, torch::kInt32);
  step_world_.broadcast(saved);
  return saved.item<int>() != 0;
}

bool StateKeeper::save_last(const Position& now) {
  if (!saves()) return false;
  bool saved = now.step == resumed_step_ || is_saved(now);
  if (!saved) {
    save(now);
    saved = is_saved(now);
  }
  record_saved();
  report_saved();
  return saved;
}

void StateKeeper::require_saved(const Position& now, bool saved) const {
  if (saved || !checkpoints_) return;
  throw SystemError(
      {.what = concat("the checkpoint of the last step, ", now.step, ", is not saved: ", checkpoints_->trouble()),
       .here = options_.checkpoint_dir,
       .next = "fix that; --resume goes on from the newest checkpoint there"});
}

}  // namespace lockstep
