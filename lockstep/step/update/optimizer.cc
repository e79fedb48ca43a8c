// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <typeinfo>
#include <unordered_map>

#include "lockstep/base/process/page_guard.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/model/parameters.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/step/gradient_slices.h"
#include "lockstep/step/local_gradients.h"
#include "lockstep/step/update/device_update.h"
#include "lockstep/step/update/flat_update.h"
#include "lockstep/step/update/rule.h"
#include "lockstep/step/update/update_journal.h"
#include "lockstep/world.h"

namespace lockstep {
namespace {

UsageError state_written() {
  return UsageError(
      {.what = "the optimizer's state was written by hand, while all ranks of this machine share it",
       .likely = "an operation in place on a tensor of state_of(), or of optimizer.state[parameter] in Python",
       .next = "change a copy and set it on every rank: set_state()"});
}

// The tensor `name` of a saved state. Throws CheckpointError.
const torch::Tensor& saved(const Optimizer::StateTensors& state, const std::string& name, torch::IntArrayRef sizes,
                           torch::ScalarType dtype) {
  const auto found = state.find(name);
  if (found != state.end() && found->second.sizes() == sizes && found->second.scalar_type() == dtype)
    return found->second;
  throw CheckpointError({.what = concat("no optimizer state \"", name, "\" of ", dtype, sizes),
                         .likely = "a checkpoint of another optimizer or model",
                         .next = "resume with the options that the run was started with"});
}

// All tensors that an update writes.
Tensors tensors_of(const OptimizerState& state) {
  Tensors all = state.parameters;
  state.for_each_list([&](const auto& list) { std::ranges::copy(list, std::back_inserter(all)); });
  std::erase_if(all, [](const torch::Tensor& tensor) { return !tensor.defined(); });
  return all;
}

void require_alike(const Tensors& mine, const Tensors& theirs) {
  const auto alike = [](const torch::Tensor& a, const torch::Tensor& b) {
    return a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
  };
  if (std::ranges::equal(mine, theirs, alike)) return;
  throw CheckpointError({.what = "the parameters and the optimizer are not those of the ranks that were lost",
                         .likely = "a program that makes another model when it is started again",
                         .next = "make the same model and optimizer in every process of the job"});
}

// Each rank copies its part of the bytes.
void copy_share(const torch::Tensor& to, const torch::Tensor& from, int rank, int ranks) {
  const auto begin = [&](int part) { return to.nbytes() * to_size(part) / to_size(ranks); };
  if (to.nbytes() > 0)
    std::memcpy(static_cast<std::byte*>(to.mutable_data_ptr()) + begin(rank),
                static_cast<const std::byte*>(from.const_data_ptr()) + begin(rank), begin(rank + 1) - begin(rank));
}

// Empty: the parameters are in one place.
OnEachGpu gpus_of(const std::shared_ptr<GradientSource>& source) {
  const auto local = std::dynamic_pointer_cast<LocalGradients>(source);
  return local ? local->on_each_gpu() : OnEachGpu();
}

// Others can finish an update only by a rule that they can make again from its options.
JournalOptions journal_options(const GradientSource& source, const UpdateRule& rule,
                               const std::vector<UpdateRule::Group>& groups, const OptimizerState& state) {
  for (const auto& group : groups) {
    const auto options = own_options(group.options());
    if (!options) return {};
    const auto again = rule_of(*options);
    if (const UpdateRule& other = *again; typeid(other) != typeid(rule)) return {};
  }
  for (const torch::Tensor& parameter : state.parameters)
    if (parameter.numel() > 0 && !source.memory()->locate(parameter.const_data_ptr(), parameter.nbytes())) return {};
  return {.kept_sources = source.kept_sources(), .groups = groups.size(), .layerwise = rule.layerwise()};
}

}  // namespace

// The parameters of all groups and their state; made by attach() or in the first step.
struct Optimizer::Layout : OptimizerState {
  size_t given = 0;                                  // number of parameters in the groups, duplicates included
  std::unordered_map<const void*, size_t> index_of;  // TensorImpl -> index in parameters
  std::unique_ptr<FlatUpdate> flat;                  // on the CPU
  std::unique_ptr<DeviceUpdate> on_device;           // on a GPU
  std::shared_ptr<GradientSlices> slices;            // of which it updates this rank's; null: everything
  StepState state;                                   // of step() so far
  double states_set = 0;                             // set_state() since broadcast_state()
  int64_t noted_writes = 0;                          // see writes()

  // Calls call(name, list) for each list that has an array beside parameter i, with its name in a saved state.
  void for_each_beside(size_t i, const std::vector<std::string>& names, const auto& call) const {
    for (size_t n = 0; n < arrays.size(); ++n) call(names[n], arrays[n]);
    if (ema_decay > 0) call("ema", averages);
    if (is_16_bit(parameters[i])) call("master", masters);
  }

  // Counts the writes to the state, by its tensors' version counters: step() itself does not raise them.
  int64_t writes() const {
    int64_t writes = 0;
    if (flat)
      for_each_list([&](const auto& list) {
        for (const torch::Tensor& tensor : list) writes += tensor.defined() ? tensor._version() : 0;
      });
    return writes;
  }
  int64_t writes_by_hand() const { return writes() - noted_writes; }
};

Optimizer::Optimizer(Tensors parameters, std::unique_ptr<torch::optim::OptimizerOptions> options,
                     std::unique_ptr<UpdateRule> rule)
    : torch::optim::Optimizer(std::move(parameters), std::move(options)), rule_(std::move(rule)) {}
Optimizer::~Optimizer() = default;

void Optimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  torch::optim::Optimizer::add_param_group(group);
  if (group.has_options()) param_groups_.back().set_options(group.options().clone());
}

Optimizer::Layout& Optimizer::layout() {
  if (layout_) return *layout_;
  auto layout = std::make_unique<Layout>();
  const OnEachGpu on_each_gpu = gpus_of(source_);
  for (size_t group = 0; group < param_groups_.size(); ++group)
    for (const torch::Tensor& parameter : param_groups_[group].params()) {
      ++layout->given;
      if (!layout->index_of.emplace(parameter.unsafeGetTensorImpl(), layout->parameters.size()).second) continue;
      static_cast<void>(dense_view(parameter));  // throws if it has gaps
      layout->parameters.push_back(parameter);
      if (!on_each_gpu) require_device(parameter, layout->parameters.front().device(), "a parameter of the optimizer");
      layout->group_of.push_back(group);
    }
  make_state(*layout);
  layout->noted_writes = layout->writes();
  layout_ = std::move(layout);
  return *layout_;
}

void Optimizer::make_state(Layout& all) {
  all.steps.resize(all.parameters.size());
  all.arrays.resize(rule_->state_names().size());
  all.ema_decay = ema_decay_;
  if (all.parameters.empty() || all.parameters.front().is_cpu()) {
    if (!source_) source_ = std::make_shared<LocalGradients>();
    all.flat = FlatUpdate::make(source_->memory(), all, journal_options(*source_, *rule_, param_groups_, all));
    return;
  }
  if (source_) all.slices = source_->slices();
  all.on_device = std::make_unique<DeviceUpdate>(all, all.slices, gpus_of(source_));
}

std::string Optimizer::manifest() const { return layout_ && layout_->flat ? layout_->flat->journal().manifest() : ""; }

uint64_t Optimizer::take_over(const std::string& manifest, const FindMemory& find) {
  Layout& all = layout();
  InterruptedUpdate lost(manifest, [&](const SharedMemory::ArenaOffset& place, size_t bytes) {
    return find(place.arena, place.offset, bytes);
  });
  const auto mine = tensors_of(all), theirs = tensors_of(lost.state);
  require_alike(mine, theirs);
  const SharedMemoryPtr& memory = source_->memory();
  const uint64_t calls = FlatUpdate::finish(memory, lost);
  const ParameterWrite write;
  for (size_t i = 0; i < mine.size(); ++i) copy_share(mine[i], theirs[i], memory->rank(), memory->size());
  all.steps = lost.state.steps;
  all.flat->journal().note_state();
  memory->barrier();
  return calls;
}

torch::Tensor Optimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const torch::AutoGradMode with_grad(true);
    loss = closure();
  }
  const PhaseScope update(Phase::kUpdate, "optimizer step");
  const torch::NoGradGuard no_grad;
  Layout& all = layout();
  size_t given = 0;
  for (const auto& group : param_groups_) given += group.params().size();
  if (given != all.given)
    throw UsageError({.what = "a parameter group was added after the optimizer's first step",
                      .next = "add all groups before it, and before DistributedDataParallel is made"});
  if (all.flat)
    step_in_memory(all);
  else
    step_on_device(all);
  all.noted_writes = all.writes();
  all.state = {all.state.calls + 1, static_cast<uint32_t>(hash_of(settings()))};
  if (adjust_loss_scale_) loss_scale_ = adjust_loss_scale_(skipped_);
  return loss;
}

// begin_update() waits until all ranks have published their gradients, if backward() has not done so; run() waits for
// norms of all ranks if it needs them; end_update() waits until all ranks have updated their slice.
void Optimizer::step_in_memory(Layout& all) try {
  if (all.writes_by_hand() != 0 && source_->memory()->size() > 1) throw state_written();
  const WeightedGradients gradients = source_->begin_update(all.parameters, settings());
  {
    const FaultScope updating(Phase::kUpdate);
    skipped_ = !all.flat->run({*rule_, param_groups_, gradients, clipping_, loss_scale_});
  }
  source_->end_update();
} catch (const std::exception& error) {
  source_->memory()->fail(concat("step() failed: ", error.what()));  // the other ranks need not wait for us
  throw;
}

StepSettings Optimizer::settings() const {
  StepSettings settings{{"clipping by norm", clipping_.max_norm},
                        {"clipping by value", clipping_.max_value},
                        {"the decay of keep_average()", ema_decay_},
                        {"the loss scale", loss_scale_.value_or(0)},
                        {"whether a GradientScaler sets the loss scale", adjusts_loss_scale() ? 1.0 : 0.0},
                        {"the number of parameter groups", static_cast<double>(param_groups_.size())}};
  for (size_t group = 0; group < param_groups_.size(); ++group)
    visit_options(param_groups_[group].options(), [&](const char* name, double value) {
      settings.push_back({name, value, static_cast<int>(group)});
    });
  int number = 0;
  for (const auto& group : param_groups_)
    for (const torch::Tensor& parameter : group.params()) add_frozen(settings, number++, !parameter.requires_grad());
  settings.push_back({"how often the optimizer's state was set", layout_ ? layout_->states_set : 0});
  settings.push_back({"how often the optimizer's state was written by hand since the last step()",
                      layout_ ? static_cast<double>(layout_->writes_by_hand()) : 0});
  return settings;
}

StepState Optimizer::step_state() const { return layout_ ? layout_->state : StepState(); }

// With slices end_update() waits, on the GPU, until all ranks have updated theirs.
void Optimizer::step_on_device(Layout& all) try {
  if (all.slices) source_->begin_update(all.parameters, {});
  skipped_ = !all.on_device->run(*rule_, param_groups_, clipping_, loss_scale_);
  if (all.slices) source_->end_update();
} catch (const std::exception& error) {
  if (all.slices) all.slices->fail(concat("step() failed: ", error.what()));
  throw;
}

double Optimizer::gradient_norm() const {
  if (!layout_) return 0;
  return layout_->flat ? layout_->flat->gradient_norm() : layout_->on_device->gradient_norm();
}

void Optimizer::set_loss_scale(std::optional<double> scale) {
  if (scale && refuses_loss_scale_)
    throw UsageError({.what = "loss scaling with a communication hook that keeps a residual",
                      .likely = "GradientScaler beside top_k_hook(), two_bit_hook() or power_sgd_hook()",
                      .next = "train without loss scaling, for instance in bfloat16, or with sixteen_bit_hook()"});
  loss_scale_ = scale;
  adjust_loss_scale_ = nullptr;
}

void Optimizer::keep_average(double decay) {
  if (decay <= 0 || decay >= 1)
    throw UsageError(
        {.what = concat("an average with decay ", decay), .next = "take one between 0 and 1, such as 0.999"});
  require_not_begun("keep_average()");
  ema_decay_ = decay;
}

void Optimizer::require_not_begun(const char* call) const {
  if (layout_)
    throw UsageError({.what = concat(call, " after the optimizer has stepped or was given a state"),
                      .next = "call it right after the optimizer is made"});
}

Optimizer::StateTensors Optimizer::state_of(const torch::Tensor& parameter) const {
  if (!layout_) return {};
  const size_t i = layout_->index_of.at(parameter.unsafeGetTensorImpl());
  if (layout_->steps[i] == 0) return {};
  StateTensors state = state_tensors(*layout_, i);
  state["step"] = torch::full({}, static_cast<double>(layout_->steps[i]), torch::kFloat32);
  return state;
}

// All but the number of steps.
Optimizer::StateTensors Optimizer::state_tensors(const Layout& all, size_t i) const {
  StateTensors state;
  all.for_each_beside(i, rule_->state_names(), [&](const std::string& name, const auto& list) {
    state[name] = all.on_device ? all.on_device->beside(list, i) : list[i];
  });
  return state;
}

void Optimizer::set_state(const torch::Tensor& parameter, const StateTensors& state) {
  const torch::NoGradGuard no_grad;
  Layout& all = layout();
  const size_t i = all.index_of.at(parameter.unsafeGetTensorImpl());
  all.steps[i] = 0;
  all.states_set += 1;
  all.for_each_beside(i, rule_->state_names(), [&](const std::string& name, const auto& list) {
    const torch::Tensor value =
        state.empty() ? torch::Tensor() : saved(state, name, parameter.sizes(), state_dtype(parameter));
    if (all.on_device)
      all.on_device->set_beside(list, i, value);
    else
      value.defined() ? torch::Tensor(list[i]).copy_(value) : torch::Tensor(list[i]).zero_();
  });
  all.noted_writes = all.writes();
  if (!state.empty())  // else as before its first update
    all.steps[i] = static_cast<int64_t>(saved(state, "step", {}, torch::kFloat32).item<float>());
  if (all.flat) all.flat->journal().note_state();
}

void Optimizer::broadcast_state(const World& world, int root) {
  const torch::NoGradGuard no_grad;
  Layout& all = layout();
  if (all.slices)
    throw UsageError({.what = "broadcast_state() of an optimizer of which each rank has a slice",
                      .next = "set_state() on every rank"});
  world.broadcast(torch::from_blob(all.steps.data(), std::ssize(all.steps), torch::kInt64), root);
  for (size_t i = 0; i < all.parameters.size(); ++i) {
    if (all.steps[i] == 0) continue;
    for (const auto& [name, tensor] : state_tensors(all, i)) broadcast_tensors(world, {{name, tensor}}, root);
  }
  all.states_set = 0;
  all.noted_writes = all.writes();
  if (all.flat) all.flat->journal().note_state();
}

void Optimizer::attach(std::shared_ptr<GradientSource> source) {
  require_not_begun("DistributedDataParallel was made");
  source_ = std::move(source);
  static_cast<void>(layout());  // now, while every rank is here
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

}  // namespace lockstep
