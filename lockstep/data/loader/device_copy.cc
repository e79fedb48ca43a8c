// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/loader/device_copy.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace lockstep {

std::optional<c10::Stream> copy_stream(torch::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

CopiedBatch start_copy(Batch batch, const std::optional<c10::Stream>& stream) {
  if (!stream) return {std::move(batch), nullptr};
  const c10::StreamGuard guard(*stream);
  const torch::Device device = stream->device();
  CopiedBatch result{{batch.data.to(device, /*non_blocking=*/true), batch.target.to(device, /*non_blocking=*/true)},
                     std::make_shared<c10::Event>(device.type())};
  result.copied->record(*stream);
  return result;
}

Batch receive(CopiedBatch arriving) {
  if (!arriving.copied) return std::move(arriving.batch);
  const torch::Device device = arriving.batch.data.device();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  arriving.copied->block(stream);
  // The allocator must not hand the memory out again on the copying stream while the step still reads it.
  arriving.batch.data.record_stream(stream);
  arriving.batch.target.record_stream(stream);
  return std::move(arriving.batch);
}

}  // namespace lockstep
