// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout.h"

#include <algorithm>

namespace lockstep {
namespace {

torch::MemoryFormat memory_format(Layout layout) {
  return layout == Layout::kChannelsLast ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::Contiguous;
}

}  // namespace

void set_layout(torch::nn::Module& model, Layout layout) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& parameter : model.parameters())
    if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(memory_format(layout)));
}

torch::Tensor in_layout(const torch::Tensor& data, Layout layout) {
  return data.dim() == 4 ? data.contiguous(memory_format(layout)) : data;
}

Layout preferred_layout(const torch::nn::Module& model, torch::Device device) {
  const auto parameters = model.parameters();
  const bool convolutional =
      std::any_of(parameters.begin(), parameters.end(), [](const torch::Tensor& p) { return p.dim() == 4; });
  return device.is_cpu() && convolutional ? Layout::kChannelsLast : Layout::kContiguous;
}

}  // namespace lockstep
