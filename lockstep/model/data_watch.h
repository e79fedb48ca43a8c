// SPDX-License-Identifier: Apache-2.0
// model/data_watch.h: finds writes through Tensor::data(), which torch's version counters do not see: data() returns a
// tensor with a counter of its own. torch::nn::utils::clip_grad_norm_ and much code by hand write that way.
//
// Flow:    ParameterBlock and SharedGradients watch tensors -> data() of one of them takes a checksum -> changed()
// Owns:    nothing: a tensor that is released meanwhile counts as unchanged
// Threads: one thread watches; data() may be called on any
// Ranks:   no communication
//
// data() is one of torch's VariableHooks. The first DataWatch puts hooks of its own before torch's: data() of a watched
// tensor, or of a view of it, takes a checksum of the tensor before it returns, once until the next watch(). So a step
// in which nobody calls data() costs nothing. A write through a raw pointer is not found here: LOCKSTEP_CHECK=1 is for that.
#pragma once

#include <torch/types.h>

#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

class DataWatch {
 public:
  DataWatch();
  ~DataWatch();
  DataWatch(const DataWatch&) = delete;
  DataWatch& operator=(const DataWatch&) = delete;

  // Watches these tensors instead of those before. Undefined ones, and those without memory, are left out.
  void watch(const std::vector<torch::Tensor>& tensors);

  // Accepts the tensors as they are now.
  void accept();

  // The first tensor, by its index in watch(), whose memory has changed since data() was first called on it.
  std::optional<std::size_t> changed() const;

  struct Storage;

 private:
  std::vector<std::shared_ptr<Storage>> storages_;
};

}  // namespace lockstep
