// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/guards/step_check.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"

namespace lockstep {
namespace {

// The ranks of each of the two values that differ, rank 0's first: "ranks 0, 2 and ranks 1, 3".
std::string ranks_by_value(const torch::Tensor& hashes) {
  std::vector<int> like_rank_0, others;
  for (int rank = 0; rank < hashes.size(0); ++rank)
    (hashes[rank].equal(hashes[0]) ? like_rank_0 : others).push_back(rank);
  return concat("not the same on ranks ", join(like_rank_0, ", "), " and on ranks ", join(others, ", "));
}

}  // namespace

StepCheck::StepCheck(World world, int interval) : world_(std::move(world)), interval_(interval) {
  if (world_.size() == 1) return;
  const torch::Tensor all = world_.all_gather(torch::tensor({static_cast<std::int64_t>(interval_)}));
  if (all.eq(all[0]).all().item<bool>()) return;
  throw MismatchError({.what = concat("LOCKSTEP_CHECK is ", ranks_by_value(all)),
                       .here = concat(world_.describe(), ", where it is ", interval_),
                       .likely = "a variable that was not passed on to all machines",
                       .next = "set it for every rank, or for none"});
}

void StepCheck::exchanged(const std::vector<NamedTensor>& parameters) {
  ++exchanges_;
  if (interval_ != 0 && exchanges_ % static_cast<unsigned>(interval_) == 0)
    compare(parameters, concat("after ", exchanges_, " exchanges"));
}

void StepCheck::compare(const std::vector<NamedTensor>& parameters, const std::string& when) const {
  if (world_.size() == 1 || parameters.empty()) return;
  std::vector<std::int64_t> own;
  for (const auto& [name, tensor] : parameters) {
    const torch::Tensor values = dense_view(tensor.detach()).cpu();
    own.push_back(std::bit_cast<std::int64_t>(XXH3_64bits(values.const_data_ptr(), values.nbytes())));
  }
  const torch::Tensor all = world_.all_gather(torch::tensor(own, torch::kInt64)).view({world_.size(), -1});
  for (std::int64_t i = 0; i < all.size(1); ++i) {
    const torch::Tensor hashes = all.select(1, i);
    if (hashes.eq(hashes[0]).all().item<bool>()) continue;
    throw MismatchError(
        {.what = concat("parameter ", parameters[to_size(i)].name, " is ", ranks_by_value(hashes), ", ", when),
         .here = world_.describe(),
         .likely = "a write on some ranks only, or ranks whose kernels round differently: other CPUs, "
                   "other numbers of threads",
         .next = "let all ranks read the same file and draw from the same seed; LOCKSTEP_CHECK=1 tells the step after "
                 "which they differ"});
  }
}

double StepCheck::hash_of_part(const std::vector<NamedTensor>& parameters) const {
  constexpr std::size_t kLeast = 4096, kMostParts = 100;
  static const bool is_off = std::getenv("LOCKSTEP_CHECK") != nullptr && check_interval() == 0;
  if (world_.size() == 1 || is_off) return 0;
  std::size_t bytes = 0, first = 0;
  for (const auto& [name, tensor] : parameters) bytes += tensor.nbytes();
  const std::size_t parts = std::clamp<std::size_t>(bytes / kLeast, 1, kMostParts), part = exchanges_ % parts;
  const std::size_t begin = bytes * part / parts, end = bytes * (part + 1) / parts;
  std::uint64_t hash = 0;
  for (const auto& [name, tensor] : parameters) {
    const std::size_t from = std::max(begin, first), to = std::min(end, first + tensor.nbytes());
    if (from < to && tensor.is_cpu() && tensor.is_non_overlapping_and_dense())
      hash = XXH3_64bits_withSeed(static_cast<const char*>(tensor.const_data_ptr()) + (from - first), to - from, hash);
    first += tensor.nbytes();
  }
  return static_cast<double>(hash >> 11);  // exact
}

}  // namespace lockstep
