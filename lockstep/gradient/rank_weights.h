// SPDX-License-Identifier: Apache-2.0
// gradient/rank_weights.h: compares how the ranks' batches count in one exchange.
//
// Threads: a function
// Ranks:   all ranks call it with the same values
#pragma once

#include <span>

#include "lockstep/batch_weight.h"

namespace lockstep {

// Two numbers, as ranks send them.
struct RankWeight {
  double kinds = BatchWeight::kNone;  // bits of BatchWeight::Kind
  double size = 0;                    // sum of BatchWeight::size

  bool has(BatchWeight::Kind kind) const { return (static_cast<int>(kinds) & kind) != 0; }
  void add(const BatchWeight& batch) { *this = {double(static_cast<int>(kinds) | batch.kind), size + batch.size}; }
};

// Returns the number of ranks that the sum of gradients is divided by; 0: they count by samples. Throws MismatchError if
// some count by samples and others alike. Warns if ranks count alike and their sizes differ: on the first of them, once
// in a process.
double compare_weights(std::span<const RankWeight> ranks, int rank);

}  // namespace lockstep
