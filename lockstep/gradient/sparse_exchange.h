// gradient/sparse_exchange.h: the mean of gradients that have few rows, as an embedding's: only those rows are sent.
#pragma once

#include <torch/types.h>

#include "lockstep/world.h"

namespace lockstep {

// The sum over ranks of factor * parameter.grad(), as a coalesced sparse tensor of `parameter`'s shape that has the
// rows which any rank has, with the same bits everywhere; undefined if none has any. parameter: at least one
// dimension. .grad: sparse in the first dimension, or dense; undefined, or with factor 0: no rows of this rank. Sends
// each rank's rows to all others. Blocks. Throws PeerLost.
torch::Tensor sum_of_rows(const World& world, const torch::Tensor& parameter, double factor);

}  // namespace lockstep
