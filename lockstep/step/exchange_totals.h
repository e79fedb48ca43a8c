// SPDX-License-Identifier: Apache-2.0
// step/exchange_totals.h: what the ranks sum up in every exchange through buckets beside the gradients: samples and
// loss; whether one was asked to stop; and whether they all agree on what a step is.
//
// Flow:    buckets.cc -> here -> World::all_reduce
// Owns:    a tensor of ten numbers, and two for each rank: how it counts (step/rank_weights.h)
// Threads: one thread
// Ranks:   all, in every exchange
//
// Note [Equal on all ranks, by a sum]
// N numbers are equal if and only if N times the sum of their squares is the square of their sum. So one all-reduce, which is
// needed for the samples anyway, also compares settings: it sums the halves of their hash, and the squares of these. Sums of
// whole numbers below 2^53 are exact in any order. N ranks send 80 + 16 N bytes. Only if they differ the settings themselves
// are gathered, to name the one.
#pragma once

#include <torch/types.h>

#include <optional>
#include <vector>

#include "lockstep/batch_totals.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/step/accumulated_batches.h"
#include "lockstep/step/step_agreement.h"
#include "lockstep/world.h"

namespace lockstep {

class ExchangeTotals {
 public:
  explicit ExchangeTotals(World world);

  // Starts the sum, on the device of the world: a GPU has it as soon as it has the loss, before it computes any gradient. Does not
  // block.
  void start(const AccumulatedBatches& batches, StepSettings settings);

  // Returns the samples of all ranks. Blocks; compares nothing. Throws PeerLost.
  std::int64_t samples();

  // The number of backward() calls of the ranks whose first batches were not empty; none: there is no such rank, or they
  // differ, as wait() will say. Blocks. Throws PeerLost.
  std::optional<std::uint32_t> backwards();

  // Blocks. Throws MismatchError on all ranks: other settings, or backward() called another number of times since the
  // last exchange, or loss.backward() on some of them only; PeerLost.
  BatchTotals wait();

  // After wait(): the sum of all gradients divided by it is their mean.
  double divisor() const { return divisor_; }

 private:
  torch::Tensor sums();
  [[noreturn]] void throw_difference() const;

  World world_;
  StepSettings settings_;
  torch::Tensor sums_;
  double divisor_ = 0;
  std::optional<Work> work_;                 // until it was waited for
  std::optional<NumbersOnTheWay> from_gpu_;  // of a GPU
};

}  // namespace lockstep
