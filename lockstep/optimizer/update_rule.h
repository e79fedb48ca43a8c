// optimizer/update_rule.h: one optimizer's formula, over a run of elements that lie next to each other. What an
// optimizer is made of; which elements, from which gradients and on which rank is up to flat_update.h.
//
// Threads: called for different runs from several threads at once
// Ranks:   no communication
#pragma once

#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>

namespace lockstep {

inline constexpr std::size_t kMaxStates = 2;

template <class T>
struct Run {
  std::int64_t count;
  T* parameter;
  T* gradient;                         // of the mean loss over the global batch; may be overwritten
  std::array<T*, kMaxStates> state{};  // zero before the first step
  std::int64_t step;                   // of this parameter, from 1
  double trust = 1;                    // layer-wise rules: what trust_ratio() gave
};

class UpdateRule {
 public:
  using Group = torch::optim::OptimizerParamGroup;  // where the options are
  virtual ~UpdateRule() = default;

  // T is float (also for 16-bit parameters, which are kept in float32 beside) or double.
  virtual void update(const Group& group, const Run<float>& run) const = 0;
  virtual void update(const Group& group, const Run<double>& run) const = 0;

  // Rules that scale each parameter's step by norms over all of it. direct() may turn the gradient into a direction;
  // trust_ratio() then gets the norms of the parameter and of that direction.
  virtual bool layerwise() const { return false; }
  virtual void direct(const Group&, const Run<float>&) const {}
  virtual void direct(const Group&, const Run<double>&) const {}
  virtual double trust_ratio(const Group&, double /*parameter_norm*/, double /*direction_norm*/) const { return 1; }
};

}  // namespace lockstep
