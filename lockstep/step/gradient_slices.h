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

#include <torch/types.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "lockstep/sampler.h"
#include "lockstep/step/bucket.h"
#include "lockstep/world.h"

namespace lockstep {

class GradientSlices {
 public:
  // Elements [begin, begin + values.numel()) of a parameter in its memory order.
  struct Part {
    torch::Tensor parameter;
    std::int64_t begin = 0;
    torch::Tensor values;    // (elements) of the parameter
    torch::Tensor gradient;  // (elements) the mean, in step()
  };

  // Moves the parameters into blocks. buckets: made with slices. cuts: a multiple of the ranks; 0: as many.
  GradientSlices(World world, std::vector<Bucket>& buckets, int cuts = 0);

  // This rank's slice of bucket i, which the exchange fills.
  const torch::Tensor& slice(std::size_t bucket) const { return blocks_[bucket].gradients; }

  // Parameters that have a gradient on some rank, in the exchange that has just filled the slices.
  void set_used(const std::vector<torch::Tensor>& parameters);
  bool is_used(const torch::Tensor& parameter) const { return used_.contains(parameter.unsafeGetTensorImpl()); }

  const std::vector<Part>& parts() const { return parts_; }

  // This rank's slice of the parameters is updated. Gives it to the other ranks, and waits for theirs. Throws PeerLost.
  void all_gather() const;

  // The 2-norm over the parts of all ranks. own: of each part, float64. Blocks. Throws PeerLost.
  double norm(const std::vector<torch::Tensor>& own) const;
  torch::Tensor zero() const { return torch::zeros({}, torch::TensorOptions(torch::kFloat64).device(world_.device())); }

  // A tensor like `parameter` on the CPU, put together from what all ranks have beside its parts. All ranks call. Throws PeerLost.
  torch::Tensor gather(const torch::Tensor& parameter, const std::vector<torch::Tensor>& beside,
                       torch::ScalarType dtype) const;

  // The other ranks get PeerLost with `reason`.
  void fail(const std::string& reason) const { world_.abandon(reason); }

 private:
  struct Block {
    torch::Tensor parameters;  // (cuts, elements of a cut)
    torch::Tensor gradients;   // of this rank's slice, flat
  };

  void add_parts(const Slot& slot, const Block& block, std::vector<std::int64_t>& numbers);
  Range own_cuts() const;

  World world_;
  int cuts_;
  std::vector<Block> blocks_;
  std::vector<Part> parts_;  // of this rank
  std::int64_t all_parts_ = 0;
  torch::Tensor numbers_;                                            // of parts_, among those of all ranks
  std::unordered_map<const void*, std::vector<std::int64_t>> rows_;  // of a parameter: elements on each rank
  std::vector<torch::Tensor> parameters_;
  std::unordered_set<const void*> used_;
};

}  // namespace lockstep
