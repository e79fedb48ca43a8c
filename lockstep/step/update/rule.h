// SPDX-License-Identifier: Apache-2.0
// step/update/rule.h: an UpdateRule whose formula is written once for float and double, with its options at hand.
//
// Threads: as lockstep/update_rule.h
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "lockstep/optimizers.h"

namespace lockstep {

// Throws UsageError: values that make no sense.
void require_valid(const OptimizerOptions& options);

// Throws UsageError: a group sets momentum where the optimizer keeps none.
void require_momentum(bool is_kept);

// Calls option(name, value) for every option of a parameter group, as values_of() has them. Allocates nothing.
void visit_options(const torch::optim::OptimizerOptions& options,
                   const std::function<void(const char* name, double value)>& option);

// Sets those of `values` that the options of a parameter group have, as values_of() has named them.
void set_options(torch::optim::OptimizerOptions& options, const OptionValues& values);
// The options of a parameter group, if they are of one of lockstep's optimizers.
std::optional<OptimizerOptions> own_options(const torch::optim::OptimizerOptions& options);

// The rule that these options choose.
std::unique_ptr<UpdateRule> rule_of(const OptimizerOptions& options);

// Rule derives from this and has what follows. It writes every element of new_parameter and new_state, also those that stay
// as they were: where others may have to finish a step, these are not the old values' memory. Where direct() writes the
// state, update() does not.
//   template <class T> static void apply(const Options&, const Elements<T>&);
//   static void apply_on_device(const Options&, const WholeTensors&);
//   template <class T> static void find_direction(const Options&, const Elements<T>&);  // if it turns the gradient
template <class Options, class Rule>
class RuleWith : public UpdateRule {
 public:
  explicit RuleWith(const Options& options, std::vector<std::string> state_names) : UpdateRule(std::move(state_names)) {
    require_valid(options);
  }

  void update(const Group& group, const Elements<float>& elements) const final {
    Rule::apply(options_of<Options>(group), elements);
  }
  void update(const Group& group, const Elements<double>& elements) const final {
    Rule::apply(options_of<Options>(group), elements);
  }
  void update_on_device(const Group& group, const WholeTensors& tensors) const final {
    Rule::apply_on_device(options_of<Options>(group), tensors);
  }

  void direct(const Group& group, const Elements<float>& elements) const final {
    Rule::find_direction(options_of<Options>(group), elements);
  }
  void direct(const Group& group, const Elements<double>& elements) const final {
    Rule::find_direction(options_of<Options>(group), elements);
  }
  static void find_direction(const Options&, const auto&) {}
};

}  // namespace lockstep
