// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/server_table.h: what one server stores: its slices, the optimizer's state, and what each worker has
// pushed that is not merged yet.
//
// Flow:    server.h -> here -> optimizer/
// Owns:    a block of values, a block for sums, and an inbox like them per worker
// Threads: one at a time (the server's lock); a worker's inbox may be filled meanwhile
// Ranks:   a server's own
//
// Memory, for B bytes of this server's slices and N workers: (2 + N) B, and the state of its optimizers: one, or one per
// worker.
#pragma once

#include <algorithm>
#include <memory>
#include <ranges>
#include <span>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/kvstore.h"
#include "lockstep/optimizer.h"
#include "lockstep/strategy/kvstore/key_plan.h"

namespace lockstep {

// What a checkpoint keeps of a slice: its value and the optimizer's state, which may be empty.
struct SliceState {
  KeySlice place;
  torch::Tensor value;
  Optimizer::StateTensors state{};
};

struct UpdateRate {
  double learning_rate;  // NaN: the last one, or the optimizer's own
  double factor = 1;     // of this update
};

class ServerTable {
 public:
  using Workers = std::ranges::iota_view<int, int>;

  void create(BlockLayout layout, int workers);
  bool created() const { return values_.defined(); }
  void set_inbox(int worker, torch::Tensor block) { inboxes_[worker] = std::move(block); }
  // own_state: where values are not 16-bit, each worker's gradients have an optimizer's state of their own.
  void set_optimizer(const UpdateOptions& options, bool own_state);
  bool has_optimizer() const { return !optimizers_.empty(); }

  const BlockLayout& layout() const { return layout_; }
  const torch::Tensor& values() const { return values_; }
  const torch::Tensor& inbox(int worker) const { return inboxes_[worker]; }

  // ---- Pushes

  // The worker's inbox holds its values of those slices that have one (1 in has_value, slice by slice). samples: their
  // weight.
  void add_push(int worker, SliceRange slices, std::span<const std::uint8_t> has_value, std::int64_t samples) {
    for (auto flag = has_value.begin(); Slice & slice : in(slices))
      slice.pushes[worker] = {.unmerged = true, .has_value = *flag++ != 0, .samples = samples};
  }
  bool has_unmerged(int worker, SliceRange slices) const {
    return std::ranges::any_of(in(slices), [worker](const Slice& slice) { return slice.pushes[worker].unmerged; });
  }

  // Somebody who has not pushed a slice that this worker has pushed; the worker itself if there is nobody.
  int first_missing(int worker, SliceRange slices) const;

  // Merges those of the slices that all `workers` have pushed, and updates, with the state of the first of them.
  void merge(SliceRange slices, Workers workers, UpdateRate rate);

  // ---- Delays. A slice counts its updates, and for each worker what the count was when it read: the delay of its
  // gradient is the difference now, the largest over the slices.
  std::int64_t delay(int worker, SliceRange slices) const {
    std::int64_t most = 0;
    for (const Slice& slice : in(slices)) most = std::max(most, slice.updates - slice.read_at[worker]);
    return most;
  }
  void mark_read(int worker, SliceRange slices) {
    for (Slice& slice : in(slices)) slice.read_at[worker] = slice.updates;
  }

  // ---- Checkpoints: copies, slice by slice. The optimizer's tensors have one dimension, but for "step". With own_state
  // they are those of the worker that has pushed the most, and all workers start from them.
  std::vector<SliceState> states() const;
  void set_states(const std::vector<SliceState>& states);

 private:
  struct Push {
    bool unmerged = false;
    bool has_value = false;
    std::int64_t samples = 0;
  };
  struct Slice {
    KeySlice place;
    torch::Tensor value;     // in values_
    IntVector<Push> pushes;  // [worker]
    std::int64_t updates = 0;
    IntVector<std::int64_t> read_at;  // [worker] `updates` when it read
  };

  std::span<Slice> in(SliceRange range) { return std::span(slices_).subspan(range.first, range.size()); }
  std::span<const Slice> in(SliceRange range) const { return std::span(slices_).subspan(range.first, range.size()); }
  Optimizer& most_advanced(const torch::Tensor& value) const;
  torch::Tensor merged(Slice& slice, Workers workers);
  void apply(Slice& slice, const torch::Tensor& value);
  void update(int worker, UpdateRate rate);

  BlockLayout layout_;
  torch::Tensor values_;
  torch::Tensor sums_;  // where values of several workers are added up
  IntVector<torch::Tensor> inboxes_;
  std::vector<Slice> slices_;
  IntVector<std::shared_ptr<Optimizer>> optimizers_;  // one; with own_state [worker]
  double learning_rate_ = 0;
  std::vector<Slice*> changed_;  // by this merge
};

}  // namespace lockstep
