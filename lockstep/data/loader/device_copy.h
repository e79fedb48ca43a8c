// SPDX-License-Identifier: Apache-2.0
// data/loader/device_copy.h: brings a batch to a GPU on a stream of its own, ahead of the step that takes it.
//
// Flow:    a batch in pinned memory -> start_copy() -> receive() on the thread that takes it
// Owns:    nothing
// Threads: a copy may be started on one thread and received on another
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

// The stream for copies from pinned memory to the device during another step; none on the CPU. A device has one: CUDA's
// allocator keeps the memory of a stream for that stream.
std::optional<c10::Stream> copy_stream(torch::Device device);

// Does not block where the batch lies in pinned memory. Throws DeviceError.
CopiedBatch start_copy(Batch batch, const std::optional<c10::Stream>& stream);

// The batch, for the calling thread's current stream: what is queued there from now on runs after the copy. Does not
// block.
Batch receive(CopiedBatch arriving);

}  // namespace lockstep
