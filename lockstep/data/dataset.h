// data/dataset.h: what a dataset is: a number of samples, and a way to make a batch of any of them.
//
// Flow:    files -> a Dataset -> data/loader.h
// Owns:    a dataset owns its samples
// Threads: make_batch() is const and may be called from several threads at once
// Ranks:   every rank has the same dataset; the sampler decides who takes what
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <string>

namespace lockstep {

// A rank's part of a global batch. data: (B, ...) float; target: (B) int64. B may be 0: such a rank still takes part.
struct Batch {
  torch::Tensor data;
  torch::Tensor target;
  std::int64_t size() const { return target.defined() ? target.size(0) : 0; }
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::string name() const = 0;
  virtual std::int64_t size() const = 0;
  // The samples at these places, in this order, on the CPU. Each index is in [0, size()).
  virtual Batch make_batch(std::span<const std::int64_t> indices) const = 0;
};

}  // namespace lockstep
