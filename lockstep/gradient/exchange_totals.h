// SPDX-License-Identifier: Apache-2.0
// gradient/exchange_totals.h: what the ranks sum up in every exchange through buckets beside the gradients: samples and
// loss; whether one was asked to stop; and whether they all agree on what a step is.
//
// Flow:    Reducer -> here -> World::all_reduce
// Owns:    a tensor of ten numbers, or some more with many ranks
// Threads: one thread
// Ranks:   all, in every exchange
//
// Note [Equal on all ranks, by a sum]
// N ranks have the same bits if and only if each bit is set on none or on all. So one all-reduce, which is needed for the
// samples anyway, also compares settings: it sums up how many ranks have each bit of a hash. As many of these counts as fit
// lie side by side in the 53 bits of a float64, each in as many bits as N has: exact for any N. Two ranks send 80 bytes, 1,000
// ranks 240. Only if they differ the settings themselves are gathered, to name the one.
#pragma once

#include <torch/types.h>

#include <bit>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/base/to_size.h"
#include "lockstep/batch_totals.h"
#include "lockstep/gradient/accumulated_batches.h"
#include "lockstep/gradient/step_agreement.h"
#include "lockstep/world.h"

namespace lockstep {

// How many of `ranks` ranks have each bit of a number, as float64 that are summed over the ranks.
class BitCounts {
 public:
  explicit BitCounts(int ranks) : width_(std::bit_width(static_cast<unsigned>(ranks))), per_number_(53 / width_) {}

  std::size_t size() const { return to_size((63 + per_number_) / per_number_); }
  void append(std::uint64_t bits, std::vector<double>& numbers) const;

  // The bits that each of `ranks` has, where the others have added none; none: they differ.
  std::optional<std::uint64_t> common(std::span<const double> sums, double ranks) const;

 private:
  int width_;       // of a count, in bits
  int per_number_;  // so many
};

class ExchangeTotals {
 public:
  explicit ExchangeTotals(World world) : world_(std::move(world)), bits_(world_.size()) {}

  // Starts the sum. On the device of the world: nobody has to wait for a GPU here. Does not block.
  void start(const AccumulatedBatches& batches, StepSettings settings);

  // Of all ranks. Blocks; compares nothing. Throws PeerLost.
  std::int64_t samples();

  // How often the ranks have called backward() whose first batches were not empty; none: there is no such rank, or they
  // differ, as wait() will say. Blocks. Throws PeerLost.
  std::optional<std::int64_t> backwards();

  // Blocks. Throws MismatchError on all ranks: other settings, or backward() called another number of times since the
  // last exchange, or loss.backward() on some of them only; PeerLost.
  BatchTotals wait();

 private:
  torch::Tensor sums();
  std::optional<std::uint64_t> common_calls(std::span<const double> sums) const;
  [[noreturn]] void throw_difference() const;

  World world_;
  BitCounts bits_;
  StepSettings settings_;
  torch::Tensor sums_;
  std::optional<Work> work_;  // until it was waited for
};

}  // namespace lockstep
