// gradient/gradient_memory.h: lets autograd put fresh gradients where the other ranks of the machine can read them, so
// that publishing a gradient copies nothing.
//
// Flow:    backward() allocates a result of a parameter's size -> here -> AccumulateGrad keeps it as .grad -> peers
// Owns:    blocks of peer-visible memory, used again once their tensor is gone
// Threads: a Scope belongs to the thread that made it; tensors may be released on any thread
// Ranks:   no communication
//
// Note [Gradients in place]
// AccumulateGrad takes over a fresh gradient if nobody else holds it and its strides are the parameter's. So it is
// enough to hand out peer-visible memory while backward() runs: the process's CPU allocator is wrapped once, and in a
// thread that has a Scope it serves requests of exactly a parameter's number of bytes from here. A result that only
// looks like a gradient (an activation of that size) gets such memory too, and gives it back when it goes. A gradient
// that lies elsewhere all the same (small, accumulated, sparse, made by a hook) is copied when it is published.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/collective/shared_memory.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

class GradientMemory {
 public:
  // For gradients as large as those of `parameters`; those of less than a few pages are cheaper to copy.
  GradientMemory(std::shared_ptr<SharedMemory> memory, const std::vector<NamedTensor>& parameters);
  ~GradientMemory();
  GradientMemory(const GradientMemory&) = delete;
  GradientMemory& operator=(const GradientMemory&) = delete;

  // While it lives, this thread's results of those sizes come from here. Scopes do not nest.
  class Scope {
   public:
    explicit Scope(GradientMemory& memory);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  // Where peers find the tensor's memory; none if it does not come from here.
  std::optional<std::uint64_t> place_of(const torch::Tensor& tensor) const;

  std::size_t bytes() const;  // taken so far

  class Pool;

 private:
  std::shared_ptr<Pool> pool_;
};

}  // namespace lockstep
