// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/server_table.h: what one server stores: its slices, the optimizer's state, and what each worker has
// pushed that is not merged yet.
//
// Flow:    server.h -> here -> step/update/
// Owns:    a block of values, a block for sums, and an inbox like them per worker
// Threads: one at a time (the server's lock); a worker's inbox may be filled meanwhile
// Ranks:   a server's own
//
// Memory, for B bytes of this server's slices and N workers: (2 + N) B, and the state of its optimizers: one, or one per
// worker.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <ranges>
#include <span>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/kvstore/key_plan.h"
#include "lockstep/strategy/kvstore/store.h"

namespace lockstep {

// A slice in a checkpoint: its value and the optimizer's state, which may be empty.
struct SliceState {
  KeySlice place;
  Tensor value;
  Optimizer::StateTensors state{};
};

struct UpdateRate {
  double learning_rate;  // NaN: the last one, or the optimizer's own
  double factor = 1;     // of this update
};

class ServerTable {
 public:
  using Workers = std::ranges::iota_view<int, int>;

  void create(BlockLayout layout, int workers) {
    layout_ = std::move(layout);
    inboxes_.resize(workers);
    values_ = torch::zeros({layout_.bytes()}, torch::kUInt8);
    sums_ = torch::zeros({layout_.bytes()}, torch::kUInt8);
    for (const KeySlice& place : layout_.slices())
      slices_.push_back({.place = place,
                         .value = place.in_block(values_),
                         .pushes = IntVector<Push>(workers),
                         .read_at = IntVector<int64_t>(workers)});
  }

  bool created() const { return values_.defined(); }
  void set_inbox(int worker, Tensor block) { inboxes_[worker] = std::move(block); }
  // own_state: each worker's gradients have an optimizer's state of their own. Where values are 16-bit, the optimizer keeps their
  // float32 originals: there is only one.
  void set_optimizer(const UpdateOptions& options, bool own_state) {
    Tensors trained;
    bool wide = true;
    for (const Slice& slice : slices_) {
      if (!slice.place.trained) continue;
      trained.push_back(slice.value);
      wide = wide && slice.value.element_size() > 2;
    }
    const int count = own_state && wide ? inboxes_.size() : 1;
    for (int i = 0; i < count; ++i) optimizers_.push_back(make_optimizer(trained, options));
    learning_rate_ = values_of(options.optimizer).at("lr");
  }

  bool has_optimizer() const { return !optimizers_.empty(); }

  const BlockLayout& layout() const { return layout_; }
  const Tensor& values() const { return values_; }
  const Tensor& inbox(int worker) const { return inboxes_[worker]; }

  // ---- Pushes

  // The worker's inbox holds its values of those slices that have one (1 in has_value, slice by slice). samples: their
  // weight.
  void add_push(int worker, SliceRange slices, std::span<const uint8_t> has_value, int64_t samples) {
    for (auto flag = has_value.begin(); Slice & slice : in(slices))
      slice.pushes[worker] = {.unmerged = true, .has_value = *flag++ != 0, .samples = samples};
  }
  bool has_unmerged(int worker, SliceRange slices) const {
    return std::ranges::any_of(in(slices), [worker](const Slice& slice) { return slice.pushes[worker].unmerged; });
  }

  // Somebody who has not pushed a slice that this worker has pushed; the worker itself if there is nobody.
  int first_missing(int worker, SliceRange slices) const {
    for (const Slice& slice : in(slices))
      for (int other = 0; other < slice.pushes.size(); ++other)
        if (slice.pushes[worker].unmerged && !slice.pushes[other].unmerged) return other;
    return worker;
  }

  // Merges those of the slices that all `workers` have pushed, and updates, with the state of the first of them.
  void merge(SliceRange slices, Workers workers, UpdateRate rate) {
    for (Slice& slice : in(slices))
      if (std::ranges::all_of(workers, [&](int worker) { return slice.pushes[worker].unmerged; }))
        apply(slice, merged(slice, workers));
    update(workers.front(), rate);
  }

  // ---- Delays. A slice counts its updates, and for each worker what the count was when it read: the delay of its
  // gradient is the difference now, the largest over the slices.
  int64_t delay(int worker, SliceRange slices) const {
    int64_t most = 0;
    for (const Slice& slice : in(slices)) most = std::max(most, slice.updates - slice.read_at[worker]);
    return most;
  }
  void mark_read(int worker, SliceRange slices) {
    for (Slice& slice : in(slices)) slice.read_at[worker] = slice.updates;
  }

  // ---- Checkpoints: copies, slice by slice. The optimizer's tensors have one dimension, but for "step". With own_state
  // they are those of the worker that has pushed the most, and all workers start from them.
  std::vector<SliceState> states() const {
    std::vector<SliceState> all;
    for (const Slice& slice : slices_) {
      all.push_back({.place = slice.place, .value = slice.value.clone()});
      if (!has_optimizer() || !slice.place.trained) continue;
      for (const auto& [name, tensor] : most_advanced(slice.value).state_of(slice.value))
        all.back().state[name] = tensor.clone();
    }
    return all;
  }

  // states: as states() gives them.
  void set_states(const std::vector<SliceState>& states) {
    if (!std::ranges::equal(states, slices_, {}, &SliceState::place, &Slice::place))
      throw MismatchError({.what = "the checkpoint splits its tensors differently from this server",
                           .next = "start workers and servers with the same --split-above"});
    for (size_t i = 0; i < states.size(); ++i) {
      Tensor& value = slices_[i].value;
      value.copy_(states[i].value);
      if (!slices_[i].place.trained) continue;
      for (const auto& optimizer : optimizers_) optimizer->set_state(value, states[i].state);
    }
  }

 private:
  struct Push {
    bool unmerged = false;
    bool has_value = false;
    int64_t samples = 0;
  };
  struct Slice {
    KeySlice place;
    Tensor value;            // in values_
    IntVector<Push> pushes;  // [worker]
    int64_t updates = 0;
    IntVector<int64_t> read_at;  // [worker] `updates` when it read
  };

  std::span<Slice> in(SliceRange range) { return std::span(slices_).subspan(range.first, range.size()); }
  std::span<const Slice> in(SliceRange range) const { return std::span(slices_).subspan(range.first, range.size()); }

  Optimizer& most_advanced(const Tensor& value) const {
    return **std::ranges::max_element(optimizers_, {}, [&value](const auto& optimizer) {
      const auto state = optimizer->state_of(value);
      return state.empty() ? 0 : state.at("step").template item<double>();
    });
  }

  // The mean over `workers`, weighted by samples: sum of m_j v_j / sum of m_j, where a worker without a value counts as
  // zero. Undefined if no worker has one. Integers, such as counters of batches, are the first worker's. A value that has
  // all the weight is taken from its inbox as it is: no pass over memory.
  Tensor merged(Slice& slice, Workers workers) {
    std::vector<Term> terms;
    Tensors values;
    int64_t samples = 0;
    for (const int worker : workers) {
      const Push push = std::exchange(slice.pushes[worker], {});
      samples += push.samples;
      if (!push.has_value || push.samples == 0) continue;
      values.push_back(slice.place.in_block(inbox(worker)));
      terms.push_back({values.back().const_data_ptr(), to_double(push.samples)});
    }
    if (terms.empty()) return {};
    if (!slice.value.is_floating_point()) return values.front();
    const auto all = to_double(samples);
    if (terms.size() == 1 && terms.front().weight == all) return values.front();
    for (Term& term : terms) term.weight /= all;
    const Tensor sum = slice.place.in_block(sums_);
    weighted_sum_into(sum, terms);
    return sum;
  }

  // A gradient waits for update(); another value is stored at once.
  void apply(Slice& slice, const Tensor& value) {
    if (!value.defined()) return;
    if (slice.place.trained && has_optimizer())
      slice.value.mutable_grad() = value;
    else
      slice.value.copy_(value);
    if (slice.place.trained) changed_.push_back(&slice);
  }

  // The optimizer skips parameters without a gradient, so one step() updates exactly the slices that were merged.
  void update(int worker, UpdateRate rate) {
    if (changed_.empty()) return;
    if (has_optimizer()) {
      Optimizer& optimizer = *optimizers_[std::min(worker, optimizers_.size() - 1)];
      if (!std::isnan(rate.learning_rate)) learning_rate_ = rate.learning_rate;
      set_learning_rate(optimizer, rate.factor * learning_rate_);
      optimizer.step();
    }
    for (Slice* const slice : changed_) {
      slice->value.mutable_grad() = Tensor();
      ++slice->updates;
    }
    changed_.clear();
  }

  BlockLayout layout_;
  Tensor values_;
  Tensor sums_;  // where values of several workers are added up
  IntVector<Tensor> inboxes_;
  std::vector<Slice> slices_;
  IntVector<std::shared_ptr<Optimizer>> optimizers_;  // one; with own_state [worker]
  double learning_rate_ = 0;
  std::vector<Slice*> changed_;  // by this merge
};

}  // namespace lockstep
