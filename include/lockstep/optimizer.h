// lockstep/optimizer.h: what lockstep's optimizers have in common. They are torch::optim::Optimizers, so schedulers
// and parameter groups work as usual; their step() reduces the gradients of all ranks of the machine and updates in
// one pass.
//
// Flow:    gradient/ says where gradients are -> step() -> parameters
// Owns:    its state; the parameters are shared with the module
// Threads: one thread
// Ranks:   by itself it does not communicate, and takes each parameter's .grad. Attached to a
//          DistributedDataParallel, every rank calls step() in the same order, and updates a slice of the parameters
//          that all of them share
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/error.h"
#include "lockstep/gradient/step_gradients.h"
#include "lockstep/optimizer/flat_update.h"
#include "lockstep/optimizer/update_rule.h"

namespace lockstep {

class World;

// Applied to the mean gradient inside of step(): clipping .grad by hand would clip one rank's share.
struct ClippingOptions {
  double max_norm = 0;   // of all gradients together (2-norm), as torch::nn::utils::clip_grad_norm_; 0: off
  double max_value = 0;  // of each element, as clip_grad_value_; 0: off
};

class Optimizer : public torch::optim::Optimizer, protected UpdateRule {
 public:
  using StateTensors = std::map<std::string, torch::Tensor>;

  ~Optimizer() override;

  // One update of every parameter that has a gradient. Returns the closure's loss, if there is a closure. Attached, it
  // blocks until all ranks have updated. Throws UsageError (a parameter group that was added after the first step; a
  // gradient or parameter that was changed by hand while attached), PeerLost.
  torch::Tensor step(LossClosure closure = nullptr) final;

  // From now on. The same on every rank.
  void set_clipping(const ClippingOptions& options) { clipping_ = options; }

  // The 2-norm of the last step's mean gradient before clipping; 0 if no clipping by norm is set.
  double gradient_norm() const;

  // Before the first step (and before DistributedDataParallel is made): keeps average = decay * average + (1 - decay) *
  // parameter after each step; state_of() has it as "ema". Throws UsageError: not in (0, 1), or too late.
  void keep_average(double decay);

  // Gradients are divided by `scale`, and if any element on any rank is not finite then the step changes nothing and
  // skipped() says so, on every rank. What lockstep/gradient_scaler.h does. nullopt: not any more.
  void set_loss_scale(std::optional<double> scale);
  bool skipped() const { return skipped_; }

  // The state of one parameter, such as {"momentum_buffer": ..., "step": ...}; empty before its first update. The
  // tensors are views: they change with the next step.
  StateTensors state_of(const torch::Tensor& parameter) const;

  // Throws CheckpointError: tensors that are missing or of another shape.
  void set_state(const torch::Tensor& parameter, const StateTensors& state);

  // Everybody's state becomes that of `root`; for optimizers of one kind and the same parameters, whose state is each
  // rank's own. All ranks call. Blocks. Throws PeerLost.
  void broadcast_state(const World& world, int root);

  // What DistributedDataParallel does: from now on gradients come from `source`, and state lies where its ranks share
  // it. Blocks. Throws UsageError: it has stepped already.
  void attach(std::shared_ptr<GradientSource> source);

 protected:
  Optimizer(std::vector<torch::Tensor> parameters, std::unique_ptr<torch::optim::OptimizerOptions> options,
            std::vector<std::string> state_names);

  // The same formula for tensors that are not on the CPU. state: as state_names, one tensor per parameter each.
  virtual void update_on_device(const Group& group, const std::vector<torch::Tensor>& parameters,
                                const std::vector<torch::Tensor>& gradients,
                                const std::vector<std::vector<torch::Tensor>>& state,
                                const std::vector<std::int64_t>& steps) const = 0;

 private:
  struct Layout;
  Layout& layout();
  std::size_t number_of_parameters() const;
  void step_in_memory(Layout& all);
  void step_on_device(Layout& all);
  void require_not_begun(const char* call) const;

  std::vector<std::string> state_names_;
  ClippingOptions clipping_;
  double ema_decay_ = 0;
  std::optional<double> loss_scale_;
  bool skipped_ = false;
  std::shared_ptr<GradientSource> source_;  // from the first step on, or attach()
  std::unique_ptr<Layout> layout_;          // from the first step on
};

// For all groups; what schedules do each step.
void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

// Options as plain values, in the form in which torch keeps them per parameter group.
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
                      .next = "make it with lockstep::parameter_group(parameters, options)"});
  return options->values;
}

// What add_param_group() takes: parameters with options of their own, such as SGDOptions{.lr = 0.01}.
template <class Values>
torch::optim::OptimizerParamGroup parameter_group(std::vector<torch::Tensor> parameters, const Values& options) {
  return {std::move(parameters), std::make_unique<GroupOptions<Values>>(options)};
}

}  // namespace lockstep
