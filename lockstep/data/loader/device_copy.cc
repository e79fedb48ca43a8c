// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/loader/device_copy.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep {
namespace {

c10::Stream current_stream(torch::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

DeviceCopy::DeviceCopy(torch::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

CopiedBatch DeviceCopy::start(Batch batch) const {
  if (!stream_) return {std::move(batch), nullptr};
  const c10::StreamGuard guard(*stream_);
  CopiedBatch result{{batch.data.to(device_, /*non_blocking=*/true), batch.target.to(device_, /*non_blocking=*/true)},
                     std::make_shared<c10::Event>(device_.type())};
  result.copied->record(*stream_);
  return result;
}

Batch receive(CopiedBatch arriving) {
  if (!arriving.copied) return std::move(arriving.batch);
  const c10::Stream stream = current_stream(arriving.batch.data.device());
  arriving.copied->block(stream);
  // The allocator must not hand the memory out again on the copying stream while the step still reads it.
  arriving.batch.data.record_stream(stream);
  arriving.batch.target.record_stream(stream);
  return std::move(arriving.batch);
}

}  // namespace lockstep
