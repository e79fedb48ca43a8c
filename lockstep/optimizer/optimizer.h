// optimizer/optimizer.h: what lockstep's optimizers have in common: they are torch::optim::Optimizers, and their state
// can be read and set by name, which checkpoints do.
//
// Flow:    gradient/ puts the mean into .grad -> step() -> parameters
// Owns:    its state tensors; the parameters are shared with the module
// Threads: one thread
// Ranks:   no communication: equal gradients give equal parameters on every rank
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lockstep {

class Optimizer : public torch::optim::Optimizer {
 public:
  using StateTensors = std::map<std::string, torch::Tensor>;

  using torch::optim::Optimizer::Optimizer;

  // One update of every parameter that has a gradient. Returns the closure's loss, if there is a closure.
  torch::Tensor step(LossClosure closure = nullptr) final;

  // The state of one parameter, such as {"momentum_buffer": ...}; empty before its first update.
  virtual StateTensors state_of(const torch::Tensor& parameter) const = 0;
  // Throws CheckpointError: tensors that are missing, unknown or of another shape.
  virtual void set_state(const torch::Tensor& parameter, const StateTensors& state) = 0;

 protected:
  virtual void update(torch::optim::OptimizerParamGroup& group, const std::vector<torch::Tensor>& parameters) = 0;
};

// For all groups; what schedules do each step.
void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

// The gradient in the parameter's memory order, as the fused kernels take it for granted; a copy only where it differs.
torch::Tensor gradient_like(const torch::Tensor& parameter);

// The tensor `name` of a saved state as a fresh copy for `like`. Throws CheckpointError.
torch::Tensor restored(const Optimizer::StateTensors& state, const std::string& name, const torch::Tensor& like);

// Options as plain values, in the form in which torch keeps them per parameter group.
template <class Values>
class GroupOptions : public torch::optim::OptimizerCloneableOptions<GroupOptions<Values>> {
 public:
  explicit GroupOptions(Values given) : values(given) {}
  double get_lr() const override { return values.lr; }
  void set_lr(const double lr) override { values.lr = lr; }
  Values values;
};

}  // namespace lockstep
