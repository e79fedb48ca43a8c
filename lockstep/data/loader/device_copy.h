// SPDX-License-Identifier: Apache-2.0
// data/loader/device_copy.h: copies batches from CPU memory to a device on a stream of its own, during another step.
//
// Flow:    a batch in pinned memory -> DeviceCopy::start (a worker) -> receive (the training thread) -> the step
// Threads: a DeviceCopy belongs to one thread; its CopiedBatch may be received by another
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "lockstep/dataset.h"

namespace lockstep {

struct CopiedBatch {
  Batch batch;
  std::shared_ptr<c10::Event> copied;  // none on the CPU: there is no copy
};

class DeviceCopy {
 public:
  explicit DeviceCopy(torch::Device device);
  CopiedBatch start(Batch batch) const;  // does not block

 private:
  torch::Device device_;
  std::optional<c10::Stream> stream_;
};

// The batch, for the calling thread's current stream: what is queued there from now on runs after the copy. Does not
// block.
Batch receive(CopiedBatch arriving);

}  // namespace lockstep
