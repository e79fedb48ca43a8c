// SPDX-License-Identifier: Apache-2.0
// gradient/sparse_exchange.h: the sum of gradients that have few rows, as an embedding's: only those rows are sent.
#pragma once

#include <torch/types.h>

#include "lockstep/world.h"

namespace lockstep {

// The sum over ranks of factor * parameter.grad(): a coalesced sparse tensor of `parameter`'s shape with every row that
// some rank has, the same bits on every rank; undefined if no rank has any. parameter: at least one dimension. .grad:
// sparse in the first dimension, or dense; if it is undefined or factor is 0, this rank has no rows. Sends each rank's
// rows to all others. Blocks. Throws PeerLost.
torch::Tensor sum_of_rows(const World& world, const torch::Tensor& parameter, double factor);

}  // namespace lockstep
