// SPDX-License-Identifier: Apache-2.0
// model/data_watch.h: finds writes through Tensor::data(), which torch's version counters do not see: data() returns a
// tensor with a counter of its own. torch::nn::utils::clip_grad_norm_ and much code by hand write that way.
//
// Flow:    ParameterBlock and the exchange of gradients watch tensors -> data() of one of them takes a checksum -> changed()
// Owns:    nothing: a tensor that is released meanwhile counts as unchanged
// Threads: one thread watches; data() may be called on any
// Ranks:   no communication
//
// data() is one of torch's VariableHooks. The first DataWatch puts hooks of its own before torch's: data() of a watched
// tensor, or of a view of it, takes a checksum of the tensor before it returns, once until the next watch(). So a step
// in which nobody calls data() costs a look at each tensor. A write through a raw pointer is not found here: LOCKSTEP_CHECK=1 is for that.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep {

class DataWatch {
 public:
  DataWatch();
  ~DataWatch();
  DataWatch& operator=(DataWatch&&) = delete;

  // Watches these tensors instead of those before. Undefined ones, and those without memory, are left out.
  void watch(const std::vector<torch::Tensor>& tensors);

  // Accepts the tensors as they are now.
  void accept();

  // The first tensor, by its index in watch(), whose memory has changed since data() was first called on it.
  std::optional<size_t> changed() const;

  // Called by data(): the first time it takes a checksum of what is at this storage, if that is watched.
  void note(const c10::StorageImpl* storage);

 private:
  struct Watched {
    const c10::StorageImpl* storage;
    c10::weak_intrusive_ptr<c10::StorageImpl> weak;  // a gradient that was dropped gives its memory back
    size_t index;                                    // in watch()
    std::optional<uint64_t> checksum{};              // as it was when data() was first called
  };
  static std::optional<uint64_t> checksum_of(const Watched& watched);

  std::vector<Watched> watched_;  // guarded, as data() is called on any thread; it keeps its memory from step to step
  bool is_sorted_ = false;        // by storage, from the first data() on
};

}  // namespace lockstep
