// SPDX-License-Identifier: Apache-2.0
// step/gradient_slices.h: where ranks are GPUs, each updates a slice of the parameters. Gradients and parameters lie in
// buckets of one layout, and each rank has 1/N of every bucket: it gets the mean gradient of that slice, updates it, and
// gives it to the other ranks.
//
//   reduce-scatter into slice(i) (step/buckets.cc) -> set_used() -> the optimizer updates parts() -> all_gather()
//
// Owns:    blocks of parameters, of which the parameters become views; a slice of the gradients for each
// Threads: one thread
// Ranks:   all make the same calls in the same order. An update sends (N-1)/N * K from each
//
// A part is a run of elements of one parameter in a slice. The slices of all ranks are cut into `cuts` of one size, so parts,
// and the order in which norms are added up, depend on their number and not on that of the ranks.
#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "lockstep/sampler.h"
#include "lockstep/step/bucket.h"
#include "lockstep/world.h"

namespace lockstep {

class GradientSlices {
 public:
  // Elements [begin, begin + values.numel()) of a parameter in its memory order.
  struct Part {
    torch::Tensor parameter;
    int64_t begin = 0;
    torch::Tensor values;    // (elements) of the parameter
    torch::Tensor gradient;  // (elements) the mean, in step()
  };

  // Moves the parameters into blocks. buckets: made with slices. cuts: a multiple of the ranks; 0: as many.
  GradientSlices(World world, std::vector<Bucket>& buckets, int cuts = 0)
      : world_(std::move(world)), cuts_(cuts > 0 ? cuts : world_.size()) {
    std::vector<int64_t> numbers;
    for (Bucket& bucket : buckets) {
      const int64_t values = bucket.values.numel();
      const torch::Tensor block = torch::zeros_like(bucket.values);
      blocks_.push_back({block.view({cuts_, -1}), torch::zeros({values / world_.size()}, block.options())});
      for (Slot& slot : bucket.slots) {
        slot.move_parameter(block);
        add_parts(slot, blocks_.back(), numbers);
        parameters_.push_back(slot.parameter.tensor);
      }
    }
    numbers_ = torch::tensor(numbers, torch::kInt64).to(world_.device());
  }

  // This rank's slice of bucket i, which the exchange fills.
  const torch::Tensor& slice(size_t bucket) const { return blocks_[bucket].gradients; }

  // Parameters that have a gradient on some rank, in the exchange that has just filled the slices.
  void set_used(const Tensors& parameters) {
    used_.clear();
    for (const torch::Tensor& parameter : parameters) used_.insert(parameter.unsafeGetTensorImpl());
  }
  bool is_used(const torch::Tensor& parameter) const { return used_.contains(parameter.unsafeGetTensorImpl()); }

  const std::vector<Part>& parts() const { return parts_; }

  // This rank's slice of the parameters is updated. Gives it to the other ranks, and waits for theirs. Throws PeerLost.
  void all_gather() const {
    const Range own = own_cuts();
    std::vector<Work> works;
    for (const Block& block : blocks_)
      works.push_back(world_.all_gather_async(
          block.parameters.slice(0, own.begin, own.end).view(-1),
          {.output = block.parameters.view({world_.size(), block.parameters.numel() / world_.size()})}));
    for (Work& work : works) work.wait();
    for (const torch::Tensor& parameter : parameters_)
      if (is_used(parameter)) torch::autograd::impl::bump_version(parameter);
  }

  // The 2-norm over the parts of all ranks. own: of each part, float64. Blocks. Throws PeerLost.
  // Everyone's norms in one order, 0 where they are another rank's: sums with 0 are exact.
  double norm(const Tensors& own) const {
    const torch::Tensor all = torch::zeros({all_parts_}, torch::TensorOptions(torch::kFloat64).device(world_.device()));
    if (!own.empty()) torch::Tensor(all).index_copy_(0, numbers_, torch::stack(own));
    world_.all_reduce(all);
    wait_for_device(world_);
    return all.norm().item<double>();
  }
  torch::Tensor zero() const { return torch::zeros({}, torch::TensorOptions(torch::kFloat64).device(world_.device())); }

  // A tensor like `parameter` on the CPU, put together from what all ranks have beside its parts. All ranks call. Throws PeerLost.
  torch::Tensor gather(const torch::Tensor& parameter, const Tensors& beside, torch::ScalarType dtype) const {
    Tensors mine;
    for (size_t i = 0; i < parts_.size(); ++i)
      if (parts_[i].parameter.is_same(parameter)) mine.push_back(beside[i]);
    const torch::Tensor own =
        mine.empty() ? torch::empty({0}, torch::TensorOptions(dtype).device(world_.device())) : torch::cat(mine);
    const torch::Tensor all = world_.all_gather_rows(own, {.rows = rows_.at(parameter.unsafeGetTensorImpl())});
    wait_for_device(world_);
    return all.cpu().as_strided(parameter.sizes(), parameter.strides());
  }

  // The other ranks get PeerLost with `reason`.
  void fail(const std::string& reason) const { world_.abandon(reason); }

 private:
  struct Block {
    torch::Tensor parameters;  // (cuts, elements of a cut)
    torch::Tensor gradients;   // of this rank's slice, flat
  };

  // Slot and cut are ranges of one bucket; a part is where they overlap.
  void add_parts(const Slot& slot, const Block& block, std::vector<int64_t>& numbers) {
    const int64_t width = block.parameters.size(1), from = slot.gradient.storage_offset();
    const Range own = own_cuts();
    auto& rows = rows_[slot.parameter.tensor.unsafeGetTensorImpl()];
    rows.resize(to_size(world_.size()));
    for (int64_t cut = 0; cut < cuts_; ++cut) {
      const int64_t begin = std::max(from, cut * width);
      const int64_t count = std::min(from + slot.gradient.numel(), (cut + 1) * width) - begin;
      if (count <= 0) continue;
      rows[to_size(static_cast<int>(cut * world_.size() / cuts_))] += count;
      if (cut >= own.begin && cut < own.end) {
        numbers.push_back(all_parts_);
        parts_.push_back({.parameter = slot.parameter.tensor,
                          .begin = begin - from,
                          .values = block.parameters.view(-1).narrow(0, begin, count),
                          .gradient = block.gradients.narrow(0, begin - own.begin * width, count)});
      }
      ++all_parts_;
    }
  }
  Range own_cuts() const {
    const int64_t each = cuts_ / world_.size();
    return {world_.rank() * each, (world_.rank() + 1) * each};
  }

  World world_;
  int cuts_;
  std::vector<Block> blocks_;
  std::vector<Part> parts_;  // of this rank
  int64_t all_parts_ = 0;
  torch::Tensor numbers_;                                       // of parts_, among those of all ranks
  std::unordered_map<const void*, std::vector<int64_t>> rows_;  // of a parameter: elements on each rank
  Tensors parameters_;
  std::unordered_set<const void*> used_;
};

}  // namespace lockstep
