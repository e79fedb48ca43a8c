// SPDX-License-Identifier: Apache-2.0
// data/loader/batch_memory.h: memory for batches, reused once the last tensor of a batch is gone.
//
// Fresh memory costs a page fault for every 4 KiB, which takes longer than filling it.
//
// Flow:    lockstep/loader.h -> a dataset's assemble() -> a Batch -> back here when its last tensor is gone
// Owns:    the free blocks. A block in use belongs to its tensor, which keeps this alive
// Threads: any
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/base/process/own_process.h"
#include "lockstep/named_tensor.h"

namespace lockstep {

class BatchMemory : public std::enable_shared_from_this<BatchMemory> {  // made by std::make_shared
 public:
  // Keeps at most `spare_blocks` free blocks. Pinned memory is reused by the GPUs' own allocator.
  BatchMemory(size_t spare_blocks, bool pinned) : spare_blocks_(spare_blocks), pinned_(pinned) {}

  // An uninitialised, contiguous tensor on the CPU. Throws what torch throws when there is no memory.
  Tensor allocate(torch::IntArrayRef sizes, torch::ScalarType dtype);

 private:
  Tensor take(int64_t bytes);
  void put_back(Tensor block);

  const size_t spare_blocks_;
  const bool pinned_;
  const OwnProcess process_;  // in a forked child, the mutex may be locked for ever
  std::mutex mutex_;
  std::vector<Tensor> free_;
};

// Allocates from `memory` where there is one, else anew.
Tensor allocate_for_batch(BatchMemory* memory, torch::IntArrayRef sizes, torch::ScalarType dtype);

}  // namespace lockstep
