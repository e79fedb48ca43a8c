// SPDX-License-Identifier: Apache-2.0
// step/bucket.h: the gradients of several parameters as one flat tensor, which is exchanged in one collective.
//
// Flow:    .grad -> pack() -> a collective on `flat` -> store_mean() -> .grad
// Owns:    the flat tensor, in memory that other ranks of the machine can read
// Threads: one at a time
// Ranks:   no communication; every rank cuts the same parameters into the same buckets
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "lockstep/communication_hook.h"
#include "lockstep/model/parameters.h"
#include "lockstep/world.h"

namespace lockstep {

// The place of a parameter's gradient in its bucket.
struct Slot {
  NamedTensor parameter;
  torch::Tensor gradient;  // (numel) view into the bucket
  torch::Tensor flag;      // (1) view into the bucket: afterwards the number of ranks that have a gradient
  int64_t index = 0;       // of the parameter
  int times_ready = 0;     // in this backward()
  bool packed = false;
  bool is_used = false;  // packed with a gradient

  // Writes `weight` times the gradient into the slot; zeros if it does not count, whatever it holds: 0 * NaN is NaN.
  void pack(bool counts, double weight);

  // Makes `factor` times the slot the gradient: a copy; with `as_view`, a view of the slot.
  void store_mean(double factor, bool as_view);

  // The parameter becomes a part of `block`, which has the layout of the bucket's gradients.
  void move_parameter(const torch::Tensor& block);
};

// One flat tensor: the gradients of its parameters one after another, then one flag per parameter.
struct Bucket {
  torch::Tensor flat;
  torch::Tensor values;  // its gradients, and what fills it up to a whole number of slices: a view
  torch::Tensor flags;   // (slots) view
  std::vector<Slot> slots;

  // State of the exchange while it is under way.
  std::optional<Work> work{};             // of the whole bucket; with a hook or slices, of the flags alone
  std::optional<Work> slice_work{};       // with slices
  CommunicationHook::Finish finish_hook;  // with a hook

  bool full() const;

  // The gradients in memory order, as matrices (first dimension, others) where the parameter has two or more
  // dimensions. The first dimension of a parameter is the outermost also in channels_last.
  Tensors parts() const;
  Tensors parameters() const;
};

// Buckets with the last parameters first, each of one dtype and device and of at most `limit` bytes, unless a single
// parameter is larger. slices: every bucket can be cut into as many equal parts; each parameter and each part then begins
// where a GPU reads fast. 0: without gaps.
std::vector<Bucket> make_buckets(const World& world, const NamedTensors& parameters, size_t limit, int slices = 0);

}  // namespace lockstep
