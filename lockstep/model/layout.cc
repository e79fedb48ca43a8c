// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout.h"

#include <algorithm>

namespace lockstep {
namespace {

torch::MemoryFormat memory_format(Layout layout) {
  return layout == Layout::kChannelsLast ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::Contiguous;
}

// contiguous() would leave a weight for one input channel as it is: it is in both orders, but its strides would make a
// convolution compute in torch's default order.
torch::Tensor with_strides_of(Layout layout, const torch::Tensor& parameter) {
  return parameter.to(parameter.scalar_type(), /*non_blocking=*/false, /*copy=*/false, memory_format(layout));
}

}  // namespace

void set_layout(torch::nn::Module& model, Layout layout) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& parameter : model.parameters())
    if (parameter.dim() == 4) parameter.set_data(with_strides_of(layout, parameter));
}

torch::Tensor in_layout(const torch::Tensor& data, Layout layout) {
  return data.dim() == 4 ? data.contiguous(memory_format(layout)) : data;
}

Layout preferred_layout(const torch::nn::Module& model, torch::Device device) {
  const bool convolutional =
      std::ranges::any_of(model.parameters(), [](const torch::Tensor& p) { return p.dim() == 4; });
  return device.is_cpu() && convolutional ? Layout::kChannelsLast : Layout::kContiguous;
}

}  // namespace lockstep
