// SPDX-License-Identifier: Apache-2.0
// lockstep/named_tensor.h: a tensor and its name in the model.
//
// Threads: a value; copies share the tensor's memory
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <string>

namespace lockstep {

struct NamedTensor {
  std::string name;
  torch::Tensor tensor;
};

}  // namespace lockstep
