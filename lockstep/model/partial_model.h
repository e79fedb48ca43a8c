// SPDX-License-Identifier: Apache-2.0
// model/partial_model.h: makes a model of which only a part has memory. What it holds has the values that the whole model
// would have, bit for bit. Every other parameter and buffer is on torch's meta device: shape, dtype and strides, but no
// values.
//
// A task makes its model by one function, and torch::nn modules allocate and draw their initial values when they are
// constructed. So the function runs twice, while every operator that it calls passes through lockstep:
//
//   skeleton   each tensor becomes a meta tensor as soon as it was made. Noted are the tensors in order, and which of
//              them each was computed from
//   part       a tensor that the part does not need becomes a meta tensor as soon as it was made. Random operators on
//              such a tensor fill a scratch tensor, which is freed at once: the generator advances as if all had been made
//
// At no moment there is more than one tensor in memory that the part does not need (beside those below 4 KiB, which
// remain until the end). If the function can't run on meta tensors (it reads their values), the whole model is made first,
// which takes its memory for that time, and then what the part does not need is freed. A warning says so.
//
// Owns:    the skeleton
// Threads: one; the function must be deterministic given torch's default generator, which the caller guards
// Ranks:   no communication
#pragma once

#include "lockstep/base/int_vector.h"
#include "lockstep/task.h"

namespace lockstep {

// Tells whether this process has the values of a parameter or buffer.
inline bool is_held(const Tensor& tensor) { return !tensor.is_meta(); }
NamedTensors held(const NamedTensors& tensors);

// Gives a parameter or buffer other data, of any device: `data` of the meta device frees its memory. Every reference to
// the tensor sees it. Not while a graph of autograd has the tensor.
void put_data(const Tensor& tensor, const Tensor& data);
Tensor on_meta(const Tensor& tensor);  // a tensor without memory of the same shape, dtype and strides

class PartialModel {
 public:
  // Runs `make` once. Throws what it throws.
  explicit PartialModel(std::function<ModulePtr()> make);

  // Every parameter and buffer is a meta tensor.
  torch::nn::Module& skeleton() const { return *skeleton_; }

  // A model that holds what `wanted` gives of it: parameters and buffers. Seeds torch's default generator with `seed`
  // and advances it as making the whole model does. Throws what `make` throws.
  ModulePtr make_part(uint64_t seed, const std::function<Tensors(torch::nn::Module&)>& wanted) const;

 private:
  std::function<ModulePtr()> make_;
  ModulePtr skeleton_;
  IntVector<int> tensor_of_;             // of each parameter and buffer: the tensor it became; -1: another
  IntVector<std::vector<int>> sources_;  // of each tensor that was made: those it was computed from
  IntVector<bool> kept_;                 // by the model, though neither parameter nor buffer
  bool apart_ = true;                    // false: `make` can't run on meta tensors
};

}  // namespace lockstep
