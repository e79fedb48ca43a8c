// strategy/kvstore/server_table.h: what one server keeps: its slices of the values, the optimizer's state, and what
// each worker has pushed and nobody has merged yet.
//
// Flow:    kvstore/server.h -> here -> optimizer/
// Owns:    one block of values, and an inbox like it per worker
// Threads: one at a time (the server's lock); a worker's inbox may be filled meanwhile
// Ranks:   a server's own
//
// Memory, for B bytes of this server's slices and W workers: (1 + W) B, and the optimizer's state.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/strategy.h"
#include "lockstep/strategy/kvstore/key_plan.h"

namespace lockstep {

class ServerTable {
 public:
  void create(BlockLayout layout, int workers);
  void set_inbox(int worker, torch::Tensor block) { inboxes_[static_cast<std::size_t>(worker)] = std::move(block); }
  bool created() const { return values_.defined(); }
  void set_optimizer(const StrategyOptions& options);
  bool has_optimizer() const { return optimizer_ != nullptr; }

  const BlockLayout& layout() const { return layout_; }
  const torch::Tensor& values() const { return values_; }
  torch::Tensor inbox(int worker) const { return inboxes_[static_cast<std::size_t>(worker)]; }

  // ---- Pushes

  // The worker's inbox holds its values of the slices that are `given`, one by one; samples weigh them.
  void note(int worker, SliceRange slices, const std::vector<bool>& given, std::int64_t samples);
  bool holds_any(int worker, SliceRange slices) const;  // noted, and not merged
  int first_without(int worker,
                    SliceRange slices) const;  // who has not noted what this worker has; the worker itself: nobody

  // Merges and applies those of the slices that all `workers` have noted.
  void merge_complete(SliceRange slices, const std::vector<int>& workers, double learning_rate);

  // What one worker has noted, by itself.
  void apply(int worker, SliceRange slices, double learning_rate) { merge_complete(slices, {worker}, learning_rate); }

  // The delay that the worker's gradient of these slices has now.
  std::int64_t delay(int worker, SliceRange slices) const;
  void mark_read(int worker, SliceRange slices);

  // ---- Checkpoints

  // The value of a slice and, once it was updated, the optimizer's state: 1-dimensional but for "step".
  torch::Tensor value_of(std::size_t slice) const { return slices_[slice].value; }
  Optimizer::StateTensors state_of(std::size_t slice) const;
  void set(std::size_t slice, const torch::Tensor& value, const Optimizer::StateTensors& state);

 private:
  struct Note {
    bool noted = false;
    bool given = false;
    std::int64_t samples = 0;
  };
  struct Slice {
    KeySlice place;
    torch::Tensor value;      // in values_
    std::vector<Note> notes;  // of each worker
    std::int64_t updates = 0;
    std::vector<std::int64_t> read_at;  // by each worker: `updates` then
  };

  std::span<Slice> in(SliceRange range);
  std::span<const Slice> in(SliceRange range) const;
  torch::Tensor merged(Slice& slice, const std::vector<int>& workers);
  void take(Slice& slice, const torch::Tensor& value);
  void update(double learning_rate);

  BlockLayout layout_;
  torch::Tensor values_;
  torch::Tensor sums_;  // where several workers' values are merged
  std::vector<torch::Tensor> inboxes_;
  std::vector<Slice> slices_;
  std::shared_ptr<Optimizer> optimizer_;
  std::vector<Slice*> changed_;  // have a gradient
};

}  // namespace lockstep
