// SPDX-License-Identifier: Apache-2.0
// lockstep/optimizer.h: what lockstep's optimizers have in common. They are torch::optim::Optimizers, so schedulers
// and parameter groups work as usual. Given to a DistributedDataParallel, their step() sums the gradients of the ranks
// of a machine and updates the parameters in one pass over memory (docs/design/fused-step.md).
//
// Flow:    a GradientSource says where gradients are -> step() -> parameters
// Owns:    its state; the parameters are shared with the module
// Threads: one thread
// Ranks:   on its own it does not communicate and uses each parameter's .grad. Attached to a DistributedDataParallel,
//          every rank calls step() in the same order and updates a slice of the parameters that all of them share
//
// A new optimizer is an UpdateRule: see HACKING.md.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "lockstep/error.h"
#include "lockstep/named_tensor.h"
#include "lockstep/update_rule.h"

namespace lockstep {

class GradientSource;
struct StepSetting;
struct StepState;
using StepSettings = std::vector<StepSetting>;
class World;

// Applied to the mean gradient inside step(): clipping .grad by hand would clip one rank's share.
struct ClippingOptions {
  double max_norm = 0;   // of all gradients together (2-norm), as torch::nn::utils::clip_grad_norm_; 0: off
  double max_value = 0;  // of each element, as clip_grad_value_, after max_norm; 0: off
};

// The parameters of a group that have a gradient, where they are not on the CPU.
struct WholeTensors {
  Tensors parameters;
  Tensors gradients;           // one per parameter, in its memory order
  std::vector<Tensors> state;  // [name][parameter], in the order of the optimizer's state names
  std::vector<int64_t> steps;  // of each parameter, from 1
};

class Optimizer : public torch::optim::Optimizer {
 public:
  using StateTensors = std::map<std::string, Tensor>;

  ~Optimizer() override;

  // A group with options of its own; without, those of this optimizer. As torch's, which since 2.15 forgets options that are
  // not of its own optimizers: so call it on this class, not on torch's.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Updates every parameter that has a gradient. Returns the closure's loss, if there is a closure. Attached, it
  // waits until all ranks make this step with the same settings, and until all have updated. Throws UsageError (a parameter
  // group that was added after the first step; a gradient or parameter that was changed by hand while attached),
  // MismatchError on all ranks (settings() that differ, or a step() that some ranks leave out: nothing was updated), PeerLost.
  Tensor step(LossClosure closure = nullptr) final;

  // Holds from the next step on. The same on every rank.
  void set_clipping(const ClippingOptions& options) { clipping_ = options; }

  // The 2-norm of the last step's mean gradient before clipping; 0 if no clipping by norm is set.
  double gradient_norm() const;

  // Before the first step (and before DistributedDataParallel is made): keeps average = decay * average + (1 - decay) *
  // parameter after each step; state_of() has it as "ema". Throws UsageError: not in (0, 1), or too late.
  void keep_average(double decay);

  // From the next step on gradients are divided by `scale`; if any element on any rank is not finite, the step changes
  // nothing on any rank, and skipped() returns true. GradientScaler calls this. nullopt: off. Throws UsageError after
  // refuse_loss_scale().
  void set_loss_scale(std::optional<double> scale);

  // Until the next set_loss_scale(): after each step() the scale becomes adjust(skipped()).
  void adjust_loss_scale(std::function<double(bool)> adjust) { adjust_loss_scale_ = std::move(adjust); }
  bool adjusts_loss_scale() const { return adjust_loss_scale_ != nullptr; }

  // Called by DistributedDataParallel with a CommunicationHook that keeps a residual.
  void refuse_loss_scale() { refuses_loss_scale_ = true; }

  bool skipped() const { return skipped_; }

  // The settings that must be equal on all ranks when they call step(): every option of every group ("lr of parameter group 0"),
  // clipping, loss scale, and which parameters are frozen. For DistributedDataParallel.
  StepSettings settings() const;
  StepState step_state() const;  // the step() calls so far

  // The state of one parameter, such as {"momentum_buffer": ..., "step": ...}; empty before its first update. The
  // tensors are views: they change with the next step.
  StateTensors state_of(const Tensor& parameter) const;

  // Empty: as before its first update. Throws CheckpointError: tensors that are missing or of another shape.
  void set_state(const Tensor& parameter, const StateTensors& state);

  // Every rank's state becomes that of `root`. For the same optimizer with the same parameters on every rank, where each
  // rank has its own state. All ranks call. Blocks. Throws PeerLost.
  void broadcast_state(const World& world, int root);

  // Called by DistributedDataParallel: from now on step() takes gradients from `source`, and the state is in memory that
  // the source's ranks share. Blocks. Throws UsageError: it has stepped already.
  void attach(std::shared_ptr<GradientSource> source);

  bool layerwise() const { return rule_->layerwise(); }

  // The place of parameters, state and the record of the step under way, in memory that outlives the ranks: for
  // lockstep/step/update/update_journal.h. "": they are not in such memory.
  std::string manifest() const;

  // Takes parameters and state from ranks that were lost, after the step that they were in, if all of them had
  // begun it: their manifest, and where `bytes` bytes at an offset in the memory of one of their ranks are here. For the same
  // optimizer, attached, before its first step; the ranks that share its parameters call together, and then
  // DistributedDataParallel::parameters_written(). Blocks. Returns how often the lost ranks had called step(), this last one
  // included. Throws CheckpointError: another optimizer or model; PeerLost: it can still be taken over by others.
  using FindMemory = std::function<std::byte*(int rank, uint64_t offset, size_t bytes)>;
  uint64_t take_over(const std::string& manifest, const FindMemory& find);

 protected:
  Optimizer(Tensors parameters, std::unique_ptr<torch::optim::OptimizerOptions> options,
            std::unique_ptr<UpdateRule> rule);

 private:
  struct Layout;
  Layout& layout();
  void make_state(Layout& all);
  StateTensors state_tensors(const Layout& all, size_t i) const;
  void step_in_memory(Layout& all);
  void step_on_device(Layout& all);
  void require_not_begun(const char* call) const;

  std::unique_ptr<UpdateRule> rule_;
  ClippingOptions clipping_;
  double ema_decay_ = 0;
  std::optional<double> loss_scale_;
  std::function<double(bool)> adjust_loss_scale_;
  bool refuses_loss_scale_ = false;
  bool skipped_ = false;
  std::shared_ptr<GradientSource> source_;  // set by attach(), else in the first step
  std::unique_ptr<Layout> layout_;          // made by attach(), else in the first step
};

// Sets the learning rate of all groups, as a schedule does before each step.
void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

// Wraps plain options such as SGDOptions in the type that torch keeps per parameter group.
template <class Values>
class GroupOptions : public torch::optim::OptimizerCloneableOptions<GroupOptions<Values>> {
 public:
  explicit GroupOptions(Values given) : values(given) {}
  double get_lr() const override { return values.lr; }
  void set_lr(const double lr) override { values.lr = lr; }
  Values values;
};

template <class Values>
const Values& options_of(const torch::optim::OptimizerParamGroup& group) {
  const auto* options = dynamic_cast<const GroupOptions<Values>*>(&group.options());
  if (options == nullptr)
    throw UsageError({.what = "a parameter group has options of another optimizer",
                      .next = "make the group with lockstep::parameter_group(parameters, options)"});
  return options->values;
}

// The argument of add_param_group(): parameters with options of their own, such as SGDOptions{.lr = 0.01}.
template <class Values>
torch::optim::OptimizerParamGroup parameter_group(Tensors parameters, const Values& options) {
  return {std::move(parameters), std::make_unique<GroupOptions<Values>>(options)};
}

}  // namespace lockstep
