// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/guards/guards.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <unordered_set>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/samples.h"
#include "lockstep/step/guards/fitting.h"

namespace lockstep {
namespace {

// Returns 0 for options of the user's own without a learning rate.
double lr_of(const torch::optim::OptimizerParamGroup& group) try {
  return group.options().get_lr();
} catch (const c10::Error&) {
  return 0;
}

// Returns 0 for optimizers other than those that are used most.
double weight_decay_of(const torch::optim::OptimizerParamGroup& group) {
  const torch::optim::OptimizerOptions* const options = &group.options();
  if (const auto* const sgd = dynamic_cast<const torch::optim::SGDOptions*>(options)) return sgd->weight_decay();
  if (const auto* const adam = dynamic_cast<const torch::optim::AdamOptions*>(options)) return adam->weight_decay();
  if (const auto* const adamw = dynamic_cast<const torch::optim::AdamWOptions*>(options)) return adamw->weight_decay();
  return 0;
}

// Settings of an optimizer of torch's that all ranks must have alike.
StepSettings settings_of(const torch::optim::Optimizer& optimizer) {
  StepSettings settings{{"the number of parameter groups", static_cast<double>(optimizer.param_groups().size())}};
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto& group = optimizer.param_groups()[i];
    settings.push_back({"lr", lr_of(group), static_cast<int>(i)});
    settings.push_back({"weight_decay", weight_decay_of(group), static_cast<int>(i)});
  }
  return settings;
}

// A number that no other DistributedDataParallel of these ranks has. Each counts its own; the highest of all ranks grows
// with each one, whatever other ranks the members have worked with. Collective.
double agree_on_number(const World& world) {
  static std::atomic<std::int64_t> made{0};
  const torch::Tensor number = torch::full({1}, ++made, torch::kInt64).to(world.device());
  world.all_reduce(number, ReduceOp::kMax);
  return number.item<double>();
}

}  // namespace

Guards::Guards(World world, std::vector<NamedTensor> parameters, const torch::optim::Optimizer* optimizer,
               StepLayout layout)
    : world_(std::move(world)),
      check_(world_),
      parameters_(std::move(parameters)),
      optimizer_(optimizer),
      fused_(dynamic_cast<const Optimizer*>(optimizer)),
      held_(optimizer == nullptr ? 0 : parameters_of(*optimizer).size()),
      layout_(layout),
      number_(agree_on_number(world_)) {
  std::ranges::copy_if(parameters_, std::back_inserter(frozen_),
                       [](const NamedTensor& parameter) { return !parameter.tensor.requires_grad(); });
}

void Guards::begin(std::shared_ptr<ParameterBlock> block) {
  block_ = std::move(block);
  note_values();
}

bool Guards::has_copies() const { return !block_ || world_.local_size() < world_.size(); }

Guards::Values Guards::values() const {
  Values values;
  for (const auto& [name, parameter] : parameters_) {
    values.writes += parameter._version();
    values.samples = hash_of_samples(parameter, values.samples);
  }
  return values;
}

// Only through buckets: in shared memory a rank that writes alone is found in other ways.
void Guards::note_values() {
  if (layout_ == StepLayout::kPublished) return;
  values_ = values();
  if (fused_ != nullptr) calls_ = fused_->step_state().calls;
}

void Guards::parameters_written() {
  if (layout_ != StepLayout::kPublished) values_ = values();
  unexchanged_.reset();
  goes_own_way_ = false;
}

// Before each backward(). A rank that writes parameters between one in no_sync() and the exchange trains by itself, as local
// SGD does, or looks ahead along its own gradient: from then on parameters may differ.
void Guards::note_own_way(const Values& values, bool accumulates) {
  if (unexchanged_ && !(values == *unexchanged_)) goes_own_way_ = true;
  unexchanged_ = accumulates ? std::optional(values) : std::nullopt;
}

void Guards::before_accumulating() {
  if (!block_) note_own_way(values(), /*accumulates=*/true);
}

void Guards::require_all_gradients() const {
  std::vector<std::string> missing;
  for (const auto& [name, parameter] : parameters_)
    if (parameter.requires_grad() && !parameter.grad().defined()) missing.push_back(name);
  if (missing.empty()) return;
  throw UsageError(
      {.what = concat("no gradient for ", join(missing, ", ")),
       .here = world_.describe(),
       .likely = "these parameters take no part in the loss of this batch: a branch that was not taken, an output "
                 "that was not used, or detach()",
       .next = "use them, set requires_grad(false), or leave find_unused_parameters on"});
}

StepSettings Guards::settings() {
  StepSettings settings;
  if (fused_ != nullptr) {
    const StepState state = fused_->step_state();
    settings = fused_->settings();
    settings.push_back({"the number of step() calls", static_cast<double>(state.calls - calls_)});
    settings.push_back({"a setting of the last step()", static_cast<double>(state.last_settings)});
  } else if (optimizer_ != nullptr) {
    settings = settings_of(*optimizer_);
  }
  int number = 0;
  for (const NamedTensor& parameter : parameters_) add_frozen(settings, number++, !parameter.tensor.requires_grad());
  settings.push_back({"the number of the DistributedDataParallel", number_});
  const Values now = values();
  settings.push_back(
      {"parameters written since the last exchange, in place,", static_cast<double>(now.writes - values_.writes)});
  settings.push_back(
      {"parameters written since the last exchange, by step() or otherwise,", now == values_ ? 0.0 : 1.0});
  note_own_way(now, /*accumulates=*/false);
  const bool compares = has_copies() && !goes_own_way_ && !(block_ && block_->written_by_hand());
  settings.push_back({kParameters, compares ? check_.hash_of_part(parameters_) : 0});
  return settings;
}

void Guards::after_exchange() {
  require_none_unfrozen();
  require_none_added();
  if (block_) block_->require_in_place();  // values written by hand have gone into these gradients
  check_.exchanged(parameters_);
  note_values();
}

void Guards::require_none_unfrozen() const {
  for (const auto& [name, parameter] : frozen_)
    if (parameter.requires_grad())
      throw UsageError({.what = concat("parameter ", name, " requires a gradient, and did not when ",
                                       "DistributedDataParallel was made"),
                        .here = world_.describe(),
                        .likely = "a layer that is unfrozen during training: its gradient is not exchanged",
                        .next = "make the optimizer and DistributedDataParallel again after requires_grad_(true)"});
}

// lockstep's own optimizers refuse a late group themselves.
void Guards::require_none_added() const {
  if (fused_ != nullptr || optimizer_ == nullptr || parameters_of(*optimizer_).size() == held_) return;
  std::unordered_set<const void*> known;
  for (const NamedTensor& parameter : parameters_) known.insert(parameter.tensor.unsafeGetTensorImpl());
  for (const torch::Tensor& parameter : parameters_of(*optimizer_))
    if (!known.contains(parameter.unsafeGetTensorImpl()))
      throw UsageError({.what = concat("the optimizer was given a parameter of shape ", parameter.sizes(),
                                       " that was not in the module when DistributedDataParallel was made"),
                        .here = world_.describe(),
                        .likely = "a layer that was added during training: its gradient is not exchanged",
                        .next = "add it first, then make DistributedDataParallel"});
}

}  // namespace lockstep
