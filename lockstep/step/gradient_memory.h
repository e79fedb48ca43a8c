// SPDX-License-Identifier: Apache-2.0
// step/gradient_memory.h: makes autograd write fresh gradients into memory that the other ranks of the machine can
// read, so that publishing a gradient copies nothing.
//
// Flow:    backward() allocates a result of a parameter's size -> here -> AccumulateGrad keeps it as .grad -> peers
// Owns:    blocks of shared memory, reused once their tensor is released
// Threads: a Scope belongs to the thread that made it; tensors may be released on any thread
// Ranks:   no communication
//
// Side effect on the process: the first GradientMemory replaces libtorch's CPU allocator (c10::SetCPUAllocator) by one
// that forwards every request to the allocator it found, except as the note says. It stays until the process ends. It
// is made by a DistributedDataParallel whose ranks read each other's gradients; share_parameters = false
// (--separate-parameters) or mean_in_grad = true avoid it. A program that sets an allocator of its own does so first.
//
// Note [Gradients in place]
// AccumulateGrad keeps a fresh gradient as .grad without a copy if nobody else holds it and its strides are the
// parameter's. So it is enough to hand out shared memory while backward() runs: in a thread that has a Scope, requests
// of exactly a parameter's number of bytes are served from here. Another result of that size (an activation, say) gets
// such memory too and gives it back when it is released. A gradient that is elsewhere all the same (small, accumulated,
// sparse, made by a hook) is copied when it is published.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/base/process/own_process.h"
#include "lockstep/collective/shared_memory.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

// Blocks of shared memory, by size; a free block serves the next request of its size. Blocks of a size are as many as
// were in use at once, at most: nothing is given back before all are. A tensor may outlive the exchange: its block then
// keeps this, and this keeps the memory.
class GradientMemory : public std::enable_shared_from_this<GradientMemory> {
 public:
  // Serves gradients as large as those of `parameters`; those of less than 16 KiB are cheaper to copy. Made by
  // make_shared.
  GradientMemory(SharedMemoryPtr memory, const NamedTensors& parameters);

  // While one exists, this thread's results of those sizes come from here. Scopes do not nest.
  class Scope {
   public:
    explicit Scope(GradientMemory& memory);
    ~Scope();
    Scope& operator=(Scope&&) = delete;
  };

  // Returns where the other ranks find the tensor's memory; none if it does not come from here.
  std::optional<uint64_t> place_of(const torch::Tensor& tensor) const;

  // For the allocator. In a forked child neither memory nor blocks: its parent and the other ranks use the same ones.
  bool is_parents() const { return !process_.is_here(); }
  bool serves(size_t bytes) const {
    return !free_.empty() && bytes >= free_.begin()->first && free_.contains(bytes) && !is_parents();
  }
  SharedMemory::Own take(size_t bytes);
  void give_back(SharedMemory::Own block, size_t bytes);

 private:
  bool is_private() const;

  SharedMemoryPtr memory_;
  OwnProcess process_;
  std::mutex mutex_;
  std::map<size_t, std::vector<SharedMemory::Own>> free_;  // its keys never change
};

}  // namespace lockstep
