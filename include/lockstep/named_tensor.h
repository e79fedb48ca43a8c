// SPDX-License-Identifier: Apache-2.0
// lockstep/named_tensor.h: tensors, and tensors with their names in the model.
//
// Threads: a value; copies share the tensor's memory
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

namespace lockstep {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

struct NamedTensor {
  std::string name;
  Tensor tensor;
};
using NamedTensors = std::vector<NamedTensor>;

}  // namespace lockstep
