// SPDX-License-Identifier: Apache-2.0
// lockstep/update_rule.h: the formula of an optimizer, applied to consecutive elements. This is what a new optimizer
// has to write; which elements, from which gradients and on which rank is decided by Optimizer::step().
//
// Flow:    Optimizer::step() -> update() for at most 4096 elements at a time -> parameters and state
// Owns:    nothing
// Threads: called for different elements from several threads at once
// Ranks:   no communication
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch::optim {
class OptimizerParamGroup;
}

namespace lockstep {

struct WholeTensors;  // lockstep/optimizer.h

inline constexpr size_t kMaxStates = 2;

// Consecutive elements of one parameter. A custom rule may write new values over the old ones: for it, `new_parameter`
// and `new_state` are `parameter` and `state`.
template <class T>
struct Elements {
  int64_t count;
  T* parameter;
  T* gradient;                         // of the mean loss over the global batch; may be overwritten
  std::array<T*, kMaxStates> state{};  // zero before the first step
  int64_t step;                        // of this parameter, from 1
  double trust = 1;                    // layerwise rules: what trust_ratio() gave
  T* new_parameter = parameter;        // where lockstep's own rules write: over the old values, or beside them
  std::array<T*, kMaxStates> new_state = state;
};

class UpdateRule {
 public:
  using Group = torch::optim::OptimizerParamGroup;  // where the options are

  // Names of the arrays beside each parameter, such as momentum_buffer: at most kMaxStates.
  explicit UpdateRule(std::vector<std::string> state_names = {}) : state_names_(std::move(state_names)) {}
  virtual ~UpdateRule() = default;

  const std::vector<std::string>& state_names() const { return state_names_; }

  // T is float (also for 16-bit parameters, of which a float32 original is kept) or double.
  virtual void update(const Group& group, const Elements<float>& elements) const = 0;
  virtual void update(const Group& group, const Elements<double>& elements) const = 0;

  // The same for tensors that are not on the CPU.
  virtual void update_on_device(const Group& group, const WholeTensors& tensors) const = 0;

  // A layerwise rule scales each parameter's step by norms over the whole parameter. direct() may turn the gradient
  // into a direction; trust_ratio() then gets the norms of the parameter and of that direction, and update() leaves the
  // direction as it is. The state is written by direct() or by update(), never by both.
  virtual bool layerwise() const { return false; }
  virtual bool directs_with_state() const { return false; }  // direct() writes the state
  virtual void direct(const Group&, const Elements<float>&) const {}
  virtual void direct(const Group&, const Elements<double>&) const {}
  virtual double trust_ratio(const Group&, double /*parameter_norm*/, double /*direction_norm*/) const { return 1; }

 private:
  std::vector<std::string> state_names_;
};

}  // namespace lockstep
