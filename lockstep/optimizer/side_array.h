// SPDX-License-Identifier: Apache-2.0
// optimizer/side_array.h: an array beside each of some parameters, such as a momentum: as many elements, in the same
// memory order. All lie in one allocation, which the ranks of a machine share.
//
// Threads: different elements from different threads
// Ranks:   the ranks that share `memory` construct it together, from the same parameters
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/collective/shared_memory.h"

namespace lockstep {

inline bool is_16_bit(const torch::Tensor& parameter) { return parameter.element_size() == 2; }

// The dtype of a parameter's update and state: float64 for float64, float32 for all others.
inline torch::ScalarType computed_in(const torch::Tensor& parameter) {
  return parameter.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
}

class SideArray {
 public:
  SideArray() = default;

  // Zeroed, for the parameters that are `wanted`. Blocks. Throws SystemError, PeerLost.
  SideArray(SharedMemory& memory, const std::vector<torch::Tensor>& parameters,
            const std::function<bool(const torch::Tensor&)>& wanted);

  explicit operator bool() const { return data_ != nullptr; }

  template <class T>
  T* of(std::size_t parameter) const {
    return reinterpret_cast<T*>(data_.get() + offsets_[parameter]);
  }

  // The array as a tensor shaped as its parameter, which keeps the memory.
  torch::Tensor view(std::size_t index, const torch::Tensor& parameter) const;

 private:
  std::shared_ptr<std::byte> data_;
  std::vector<std::size_t> offsets_;
};

}  // namespace lockstep
