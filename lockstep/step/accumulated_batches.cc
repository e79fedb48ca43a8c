// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/accumulated_batches.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "lockstep/base/to_size.h"

namespace lockstep {
namespace {

using RankWeights = std::span<const RankWeight>;

std::vector<int> ranks_of_kind(RankWeights ranks, BatchWeight::Kind kind) {
  std::vector<int> found;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i].has(kind)) found.push_back(static_cast<int>(i));
  return found;
}

// Names the first of the ranks, and the first that differs from it.
void warn_of_sizes(RankWeights ranks, const std::vector<int>& alike) {
  static std::atomic<bool> warned{false};
  const auto size_of = [&](int rank) { return ranks[to_size(rank)].size; };
  double all = 0;
  for (const int rank : alike) all += size_of(rank);
  const double own = size_of(alike.front());
  const auto other = std::ranges::find_if(alike, [&](int rank) { return size_of(rank) != own; });
  if (std::isnan(all) || other == alike.end() || warned.exchange(true)) return;
  TORCH_WARN("lockstep: dimension 0 of the model's inputs is ", own, " on rank ", alike.front(), " and ",
             size_of(*other), " on rank ", *other, ". Each rank counts 1/", alike.size(),
             ", as in PyTorch; by samples they would count ", own, "/", all, " and ", size_of(*other), "/", all,
             ". If dimension 0 counts samples, and the loss is their "
             "mean, give weights='samples', or call model.samples(n) before each backward(). If it is a length, change "
             "nothing.");
}

}  // namespace

double compare_weights(RankWeights ranks, int rank) {
  const auto by_samples = ranks_of_kind(ranks, BatchWeight::kSamples),
             alike = ranks_of_kind(ranks, BatchWeight::kAlike);
  if (!by_samples.empty() && !alike.empty())
    throw MismatchError(
        {.what = concat("model.samples(n) was called before backward() on rank ", join(by_samples, ", "),
                        ", and not before each backward() on rank ", join(alike, ", ")),
         .here = concat("rank ", rank, " of ", ranks.size()),
         .likely = "a call that depends on the rank, or weights='samples' on some ranks only",
         .next = "call it on every rank before each backward(), with 0 where nothing counts"});
  if (alike.empty()) return 0;
  if (alike.front() == rank) warn_of_sizes(ranks, alike);
  return static_cast<double>(std::ranges::count_if(ranks, [](const RankWeight& each) { return each.kinds > 0; }));
}

}  // namespace lockstep
