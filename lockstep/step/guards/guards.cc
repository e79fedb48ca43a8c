// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/guards/guards.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <unordered_set>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/samples.h"

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
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto& group = optimizer.param_groups()[i];
    settings.push_back({"lr", lr_of(group), static_cast<int>(i)});
    settings.push_back({"weight_decay", weight_decay_of(group), static_cast<int>(i)});
  }
  return settings;
}

// A number that no other DistributedDataParallel of these ranks has. Each counts its own; the highest of all ranks grows
// with each one, whatever other ranks the members have worked with. Collective.
double agree_on_number(const World& world) {
  static std::atomic<int64_t> made{0};
  const torch::Tensor number = torch::full({1}, ++made, torch::kInt64).to(world.device());
  world.all_reduce(number, ReduceOp::kMax);
  return number.item<double>();
}

// The ranks of each of the two values that differ, rank 0's first: "ranks 0, 2 and ranks 1, 3".
std::string ranks_by_value(const torch::Tensor& hashes) {
  std::vector<int> like_rank_0, others;
  for (int rank = 0; rank < hashes.size(0); ++rank)
    (hashes[rank].equal(hashes[0]) ? like_rank_0 : others).push_back(rank);
  return concat("not the same on ranks ", join(like_rank_0, ", "), " and on ranks ", join(others, ", "));
}

}  // namespace

StepCheck::StepCheck(World world, int interval) : world_(std::move(world)), interval_(interval) {
  if (world_.size() == 1) return;
  const torch::Tensor all = world_.all_gather(torch::tensor({static_cast<int64_t>(interval_)}));
  if (all.eq(all[0]).all().item<bool>()) return;
  throw MismatchError({.what = concat("LOCKSTEP_CHECK is ", ranks_by_value(all)),
                       .here = concat(world_.describe(), ", where it is ", interval_),
                       .likely = "a variable that was not passed on to all machines",
                       .next = "set it for every rank, or for none"});
}

void StepCheck::exchanged(const NamedTensors& parameters) {
  ++exchanges_;
  if (interval_ != 0 && exchanges_ % static_cast<unsigned>(interval_) == 0)
    compare(parameters, concat("after ", exchanges_, " exchanges"));
}

void StepCheck::compare(const NamedTensors& parameters, const std::string& when) const {
  if (world_.size() == 1 || parameters.empty()) return;
  std::vector<int64_t> own;
  for (const auto& [name, tensor] : parameters) {
    const torch::Tensor values = dense_view(tensor.detach()).cpu();
    own.push_back(std::bit_cast<int64_t>(XXH3_64bits(values.const_data_ptr(), values.nbytes())));
  }
  const torch::Tensor all = world_.all_gather(torch::tensor(own, torch::kInt64)).view({world_.size(), -1});
  for (int64_t i = 0; i < all.size(1); ++i) {
    const torch::Tensor hashes = all.select(1, i);
    if (hashes.eq(hashes[0]).all().item<bool>()) continue;
    throw MismatchError(
        {.what = concat("parameter ", parameters[to_size(i)].name, " is ", ranks_by_value(hashes), ", ", when),
         .here = world_.describe(),
         .likely = "a write on some ranks only, or CPUs or numbers of threads that round differently",
         .next = "write alike on all ranks; LOCKSTEP_CHECK=1 tells the step after which they differ"});
  }
}

double StepCheck::hash_of_part(const NamedTensors& parameters) const {
  constexpr size_t kLeast = 4096, kMostParts = 100;
  static const bool is_off = std::getenv("LOCKSTEP_CHECK") != nullptr && check_interval() == 0;
  if (world_.size() == 1 || is_off) return 0;
  size_t bytes = 0, first = 0;
  for (const auto& [name, tensor] : parameters) bytes += tensor.nbytes();
  const size_t parts = std::clamp<size_t>(bytes / kLeast, 1, kMostParts), part = exchanges_ % parts;
  const size_t begin = bytes * part / parts, end = bytes * (part + 1) / parts;
  uint64_t hash = 0;
  for (const auto& [name, tensor] : parameters) {
    const size_t from = std::max(begin, first), to = std::min(end, first + tensor.nbytes());
    if (from < to && tensor.is_cpu() && tensor.is_non_overlapping_and_dense())
      hash = XXH3_64bits_withSeed(static_cast<const char*>(tensor.const_data_ptr()) + (from - first), to - from, hash);
    first += tensor.nbytes();
  }
  return static_cast<double>(hash >> 11);  // exact
}

Guards::Guards(World world, NamedTensors parameters, const torch::optim::Optimizer* optimizer, StepLayout layout)
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

Tensors parameters_of(const torch::optim::Optimizer& optimizer) {
  Tensors parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

void require_known_names(const torch::nn::Module& module, const std::set<std::string>& names) {
  const auto known = module.named_parameters(), buffers = module.named_buffers();
  for (const std::string& name : names)
    if (!known.contains(name) && !buffers.contains(name))
      throw UsageError({.what = concat("the module has no parameter or buffer ", name),
                        .next = "give names as module.named_parameters() lists them"});
}

void require_fitting(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module, bool shares,
                     const std::set<std::string>& ignored) {
  const auto own = named_parameters(module);
  for (const torch::Tensor& parameter : parameters_of(optimizer)) {
    const auto found = std::ranges::find_if(own, [&](const auto& mine) { return mine.tensor.is_same(parameter); });
    if (found == own.end())
      throw UsageError({.what = concat("the optimizer holds a tensor of shape ", parameter.sizes(),
                                       " that is not a parameter of the module"),
                        .likely = "an optimizer made before the module was replaced or its parameters were",
                        .next = "make the optimizer from module.parameters() after .to() and set_layout()"});
    if (shares && ignored.contains(found->name))
      throw UsageError(
          {.what = concat(found->name, " is ignored, but the optimizer that steps shared parameters holds it"),
           .next = "give it an optimizer of its own, or share_parameters = false"});
  }
}

}  // namespace lockstep
