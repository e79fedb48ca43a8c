// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/layout.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

void require_shards_possible(const LayoutInput& input, const DistributedDataParallelOptions& options,
                             StepLayout layout) {
  const int shards = options.virtual_shards;
  const bool on_cores = !input.is_on_gpus;
  const struct {
    bool is_so;
    const char* why;
    const char* next;
  } obstacles[] = {
      {shards < 0 || shards % input.ranks != 0, "the ranks do not divide them", "take a multiple of the ranks"},
      {options.algorithm != Algorithm::kDirect || options.hook || options.mean_in_grad,
       "a communication hook, an algorithm by name and mean_in_grad need buckets", "leave that option out"},
      {on_cores && input.ranks_on_machine < input.ranks, "not all ranks are on the cores of one machine",
       "train on one machine, or without virtual shards"},
      {on_cores && layout != StepLayout::kPublished, "parameters are separate",
       "give share_parameters = true and an optimizer of lockstep"},
      {!on_cores && layout != StepLayout::kSlices, "each GPU would have to update a slice of the parameters",
       "slice_update = true, gradient_as_bucket_view = false, no sparse gradients, and an optimizer of lockstep's "
       "other "
       "than LAMB and LARS that holds all parameters"}};
  for (const auto& [is_so, why, next] : obstacles)
    if (is_so)
      throw UsageError({.what = concat(shards, " virtual shards on ", input.ranks, " ranks: ", why),
                        .here = input.here,
                        .next = next});
  require_shards_for_fewer_ranks(shards, input.fewest_ranks, input.ranks);
}

}  // namespace

StepLayout choose_layout(const LayoutInput& input, const DistributedDataParallelOptions& options) {
  const bool sums_exactly = !options.mean_in_grad && !options.hook && options.algorithm == Algorithm::kDirect;
  StepLayout layout = StepLayout::kOwnBuckets;
  if (input.is_fused && input.is_on_gpus) {
    // With virtual shards also one rank adds up as several do.
    const bool has_slices = input.ranks > 1 || options.virtual_shards > 0;
    if (options.slice_update && has_slices && sums_exactly && !options.gradient_as_bucket_view && !input.is_layerwise &&
        input.updates_all)
      layout = StepLayout::kSlices;
  } else if (input.is_fused && options.share_parameters) {
    layout =
        sums_exactly && input.ranks_on_machine == input.ranks ? StepLayout::kPublished : StepLayout::kSharedBuckets;
  }
  if (options.virtual_shards != 0) require_shards_possible(input, options, layout);
  return layout;
}

void require_shards_for_fewer_ranks(int shards, int fewest, int ranks) {
  if (fewest < 1 || shards == 0) return;
  for (int left = ranks; left >= fewest; --left)
    if (shards % left != 0)
      throw UsageError(
          {.what = concat(shards, " virtual shards can't be divided among ", left, " ranks"),
           .likely = concat("--min-ranks lets the job go on with any number of ranks from ", fewest, " to ", ranks),
           .next = "raise --min-ranks, or give --virtual-shards a multiple of each of these numbers"});
}

}  // namespace lockstep
