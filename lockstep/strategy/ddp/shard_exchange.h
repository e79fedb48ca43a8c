// SPDX-License-Identifier: Apache-2.0
// strategy/ddp/shard_exchange.h: virtual shards where ranks are GPUs. The gradients of each shard are kept apart; each rank gets
// its slice of all V of them and adds them up in their order, so the sum does not depend on the number of ranks. NCCL's own
// sums do.
//
//   begin(), backward(), end()   for each shard of this rank: its gradients, times its samples, go into a bucket of its own
//   finish()                     all-to-all of each shard's buckets; the sum over shards, divided by all samples, is this rank's
//                                slice of the mean (gradient/gradient_slices.h)
//
// Owns:    a copy of the gradients for each shard of this rank
// Threads: one thread
// Ranks:   as strategy/ddp/gradient_exchange.h. A step sends V/N * (N-1)/N * K from each, beside the parameters
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/strategy/ddp/gradient_exchange.h"

namespace lockstep {

struct ShardExchangeOptions {
  int shards = 0;  // V, of all ranks: a multiple of their number
  std::size_t bucket_bytes = 0;
  std::function<StepSettings()> settings{};  // as ReducerOptions
  std::function<void(const BatchTotals&)> on_finished{};
};

std::unique_ptr<GradientExchange> exchange_of_shards(World world, std::vector<NamedTensor> parameters,
                                                     ShardExchangeOptions options);

}  // namespace lockstep
