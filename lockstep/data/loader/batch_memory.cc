// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/loader/batch_memory.h"

#include <algorithm>

namespace lockstep {

Tensor BatchMemory::allocate(torch::IntArrayRef sizes, torch::ScalarType dtype) {
  const auto options = torch::TensorOptions(dtype);
  // torch's own allocator of pinned memory reuses blocks too, and knows when a copy out of them is over.
  if (pinned_) return torch::empty(sizes, options.pinned_memory(true));
  const auto bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes == 0) return torch::empty(sizes, options);
  Tensor block = take(bytes);
  void* data = block.data_ptr();
  // Runs on whichever thread drops the last reference to the tensor.
  const auto give_back = [self = shared_from_this(), block](void*) mutable { self->put_back(std::move(block)); };
  return torch::from_blob(data, sizes, give_back, options);
}

// A block of `bytes` to twice as many: the one that came back last, which the caches may still hold; else a new one.
Tensor BatchMemory::take(int64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto fits = [bytes](const Tensor& block) { return block.numel() >= bytes && block.numel() / 2 <= bytes; };
    const auto last = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (last != free_.rend()) {
      Tensor found = std::move(*last);
      free_.erase(std::next(last).base());
      return found;
    }
  }
  return torch::empty({bytes}, torch::kUInt8);
}

void BatchMemory::put_back(Tensor block) {
  if (!process_.is_here()) return;
  const std::lock_guard lock(mutex_);
  if (free_.size() == spare_blocks_) free_.erase(free_.begin());  // the least recently used one
  free_.push_back(std::move(block));
}

Tensor allocate_for_batch(BatchMemory* memory, torch::IntArrayRef sizes, torch::ScalarType dtype) {
  return memory != nullptr ? memory->allocate(sizes, dtype) : torch::empty(sizes, dtype);
}

}  // namespace lockstep
