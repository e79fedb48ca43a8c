// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/side_array.h"

#include "lockstep/base/cache_line.h"

namespace lockstep {

SideArray::SideArray(SharedMemory& memory, const std::vector<torch::Tensor>& parameters,
                     const std::function<bool(const torch::Tensor&)>& wanted) {
  std::size_t bytes = 0;
  for (const torch::Tensor& parameter : parameters) {
    offsets_.push_back(bytes);
    if (wanted(parameter)) bytes += round_up(parameter.numel() * c10::elementSize(computed_in(parameter)), kCacheLine);
  }
  data_ = memory.allocate_common(bytes);
}

torch::Tensor SideArray::view(std::size_t index, const torch::Tensor& parameter) const {
  return torch::from_blob(
      of<std::byte>(index), parameter.sizes(), parameter.strides(), [keep = data_](void*) {},
      torch::TensorOptions().dtype(computed_in(parameter)));
}

}  // namespace lockstep
