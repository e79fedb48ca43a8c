// gradient/bucket.h: the gradients of several parameters as one flat tensor, which is exchanged as a whole.
//
// Flow:    .grad -> pack() -> a collective on `flat` -> store_mean() -> .grad
// Owns:    the flat tensor, in memory that other ranks of the machine can read
// Threads: one at a time
// Ranks:   no communication; every rank cuts the same parameters into the same buckets
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <vector>

#include "lockstep/model/parameters.h"
#include "lockstep/world.h"

namespace lockstep {

// Where a parameter's gradient lies in its bucket.
struct Slot {
  NamedTensor parameter;
  torch::Tensor gradient;  // (numel) view into the bucket
  torch::Tensor flag;      // (1) view into the bucket: afterwards the number of ranks that have a gradient
  std::int64_t index = 0;  // of the parameter
  int times_ready = 0;     // in this backward()
  bool packed = false;

  // `weight` times the gradient; zeros if it does not count, whatever it holds: 0 * NaN would be NaN.
  void pack(bool counts, double weight);

  // `factor` times the slot becomes the gradient: a copy, or, `as_view`, the slot itself.
  void store_mean(double factor, bool as_view);

 private:
  torch::Tensor view_like_parameter() const;
};

// One flat tensor: the gradients of its parameters one after another, then a flag for each.
struct Bucket {
  torch::Tensor flat;
  torch::Tensor values;  // its gradients: a view
  torch::Tensor flags;   // (slots) view
  std::vector<Slot> slots;

  bool full() const;

  // The gradients in memory order: the first dimension of a parameter stays the first also where channels are last.
  std::vector<torch::Tensor> parts() const;
};

// The last parameters first, of one dtype and device each, at most `limit` bytes unless a single one is larger.
std::vector<Bucket> make_buckets(const World& world, const std::vector<NamedTensor>& parameters, std::size_t limit);

}  // namespace lockstep
