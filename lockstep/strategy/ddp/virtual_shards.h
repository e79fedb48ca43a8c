// SPDX-License-Identifier: Apache-2.0
// strategy/ddp/virtual_shards.h: keeps the module's buffers the same for any number of ranks, with virtual shards
// (docs/design/fused-step.md).
//
// Threads: one thread
// Ranks:   no communication
#pragma once

#include <vector>

#include "lockstep/named_tensor.h"
#include "lockstep/task.h"

namespace lockstep {

// A rank computes its shards one after another, each forward changing the buffers. What a shard computes must not
// depend on which rank computes it, so every shard's forward begins with the same buffers: those at the beginning of
// the step. After the last one the buffers are those that the rank's first shard left; rank 0's, which every rank gets,
// are those of shard 0 of the batch.
class ShardBuffers {
 public:
  ShardBuffers() = default;
  // shards: per rank and step; 0: a step is one backward(), and buffers are left alone.
  ShardBuffers(std::vector<NamedTensor> buffers, int shards);

  // After each backward(). Returns true if it was the last of the step.
  bool finish_shard();

  // The buffers as they are now are those that the next step begins with.
  void begin_step();

 private:
  std::vector<NamedTensor> buffers_;
  int shards_ = 0;
  int done_ = 0;  // shards of this step
  Tensors at_beginning_;
  Tensors after_first_;
};

}  // namespace lockstep
