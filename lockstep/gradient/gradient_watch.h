// SPDX-License-Identifier: Apache-2.0
// gradient/gradient_watch.h: finds gradients that were replaced or written between backward() and step().
//
// Threads: one thread
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/model/data_watch.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

class GradientWatch {
 public:
  // From now on: every .grad as it is.
  void remember(const std::vector<NamedTensor>& parameters);
  void forget();

  // The first parameter, by its index, whose .grad is another tensor or has been written since.
  std::optional<std::size_t> changed() const;

  // Whether zero_grad() was called since: some .grad changed, and every one that is still there is zero.
  bool zeroed() const;

 private:
  std::vector<torch::Tensor> parameters_;
  std::vector<std::pair<const void*, std::int64_t>> identities_;  // of each .grad: the tensor and its version
  DataWatch data_;
};

}  // namespace lockstep
