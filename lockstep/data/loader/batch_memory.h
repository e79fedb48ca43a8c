// SPDX-License-Identifier: Apache-2.0
// data/loader/batch_memory.h: memory for batches, reused once the last tensor of a batch is gone.
//
// Fresh memory costs a page fault for every 4 KiB, which takes longer than filling it.
//
// Flow:    lockstep/loader.h -> a dataset's assemble() -> a Batch -> back here when its last tensor is gone
// Owns:    the free blocks; a block in use belongs to its tensor, and outlives this
// Threads: any; copies share their blocks
#pragma once

#include <torch/types.h>

#include <memory>

namespace lockstep {

class BatchMemory {
 public:
  // Keeps at most `spare_blocks` free blocks. With a device that is not the CPU, memory is pinned, and the allocator of
  // that device reuses it.
  BatchMemory(std::size_t spare_blocks, torch::Device device);

  // An uninitialised, contiguous tensor on the CPU. Throws what torch throws when there is no memory.
  torch::Tensor allocate(torch::IntArrayRef sizes, torch::ScalarType dtype);

 private:
  class Pool;
  std::shared_ptr<Pool> pool_;
  bool pinned_;
};

// From `memory` where there is one, else fresh.
torch::Tensor allocate_for_batch(BatchMemory* memory, torch::IntArrayRef sizes, torch::ScalarType dtype);

}  // namespace lockstep
