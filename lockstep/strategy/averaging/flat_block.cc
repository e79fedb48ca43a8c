// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/averaging/flat_block.h"

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::int64_t place_after(std::int64_t offset, const torch::Tensor& parameter) {
  return round_up<std::int64_t>(offset + parameter.numel(), kCacheLine / parameter.element_size());
}

}  // namespace

void refuse_16_bit_parameters(const std::vector<NamedTensor>& parameters) {
  for (const auto& [name, parameter] : parameters)
    if (parameter.element_size() == 2)
      throw UsageError(
          {.what = concat("parameters of ", c10::toString(parameter.scalar_type()), " can't be averaged: ", name),
           .likely = "the whole model was converted to 16 bits: its optimizer updates a float32 copy of the parameters",
           .next = "keep parameters in float32, and compute in 16 bits: --precision bfloat16"});
}

torch::Tensor make_flat_block(torch::nn::Module& model, const World& world) {
  const torch::NoGradGuard no_grad;
  std::vector<NamedTensor> parameters = named_parameters(model);
  std::erase_if(parameters, [](const NamedTensor& each) { return !each.tensor.requires_grad(); });
  if (parameters.empty()) throw UsageError({.what = "a model without parameters to train"});
  const torch::ScalarType dtype = parameters.front().tensor.scalar_type();
  refuse_16_bit_parameters(parameters);
  std::int64_t values = 0;
  for (const auto& [name, tensor] : parameters) {
    if (tensor.scalar_type() != dtype)
      throw UsageError({.what = concat(name, " is ", c10::toString(tensor.scalar_type()), ", but other parameters are ",
                                       c10::toString(dtype), ": they can't be one block"),
                        .next = "give all parameters one dtype"});
    values = place_after(values, tensor);
  }
  const torch::Device device = parameters.front().tensor.device();
  const torch::Tensor block = device.is_cpu() ? world.allocate({values}, dtype)
                                              : torch::empty({values}, torch::TensorOptions(dtype).device(device));
  block.zero_();
  std::int64_t offset = 0;
  for (auto& [name, tensor] : parameters) {
    const torch::Tensor place = block.as_strided(tensor.sizes(), tensor.strides(), offset);
    place.copy_(tensor);
    tensor.set_data(place);
    offset = place_after(offset, tensor);
  }
  return block;
}

}  // namespace lockstep
