// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/guards/fitting.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

std::vector<torch::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<torch::Tensor> parameters;
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
