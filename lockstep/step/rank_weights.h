// SPDX-License-Identifier: Apache-2.0
// step/rank_weights.h: compares how the ranks' batches count in one exchange.
//
// Threads: a function
// Ranks:   all ranks call it with the same values
#pragma once

#include <span>

#include "lockstep/batch_weight.h"

namespace lockstep {

struct RankWeight {
  std::uint32_t kinds = BatchWeight::kNone;  // bits of BatchWeight::Kind
  double size = 0;                           // sum of BatchWeight::size

  bool has(BatchWeight::Kind kind) const { return (kinds & kind) != 0; }
  void add(const BatchWeight& batch) { *this = {kinds | batch.kind, size + batch.size}; }
};

// Returns the number of ranks that the sum of gradients is divided by; 0: they count by samples. Throws MismatchError if
// some count by samples and others alike. Warns if ranks count alike and their sizes differ: on the first of them, once
// in a process.
double compare_weights(std::span<const RankWeight> ranks, int rank);

}  // namespace lockstep
