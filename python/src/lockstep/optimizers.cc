// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizers.h"

#include <ATen/record_function.h>

#include "bindings.h"

namespace lockstep::python {
namespace {

using ParameterList = std::vector<torch::Tensor>;

// The argument of add_param_group().
torch::optim::OptimizerParamGroup group_of(const ParameterList& parameters, const OptimizerOptions& options) {
  return std::visit([&](const auto& values) { return parameter_group(parameters, values); }, options);
}

// The rule is made from the first of `rule` and the groups' options.
std::shared_ptr<Optimizer> make(const std::string& name,
                                const std::vector<std::pair<ParameterList, OptionValues>>& groups,
                                const OptionValues& rule) {
  const auto optimizer = make_optimizer({}, optimizer_options(name, rule));
  optimizer->param_groups().clear();
  for (const auto& [parameters, values] : groups)
    optimizer->add_param_group(group_of(parameters, optimizer_options(name, values)));
  return optimizer;
}

void set_options(Optimizer& optimizer, const std::string& name, size_t group, const OptionValues& values) {
  auto& into = optimizer.param_groups().at(group);
  into.set_options(group_of({}, optimizer_options(name, values)).options().clone());
}

void set_clipping(Optimizer& optimizer, double max_norm, double max_value) {
  optimizer.set_clipping({.max_norm = max_norm, .max_value = max_value});
}

}  // namespace

void bind_optimizers(py::module_& module) {
  module.def("has_profilers", &at::hasCallbacks);  // of this thread or of all
  py::class_<Optimizer, std::shared_ptr<Optimizer>>(module, "Optimizer")
      .def(py::init(&make))
      .def("set_options", &set_options)
      .def("set_clipping", &set_clipping)
      .def("set_loss_scale", &Optimizer::set_loss_scale)
      .def(
          "step", [](Optimizer& optimizer) { optimizer.step(); }, Release())
      .def_property_readonly("skipped", &Optimizer::skipped)
      .def_property_readonly("gradient_norm", &Optimizer::gradient_norm)
      .def("state_of", &Optimizer::state_of)
      .def("set_state", &Optimizer::set_state);
}

}  // namespace lockstep::python
