// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/loader/device_copy.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <utility>

#include "lockstep/collective/gpus.h"

namespace lockstep {

std::optional<c10::Stream> copy_stream(torch::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;
  if (device.is_cpu()) return std::nullopt;
  const std::lock_guard lock(mutex);
  const auto found = streams.find(device.index());
  if (found != streams.end()) return found->second;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  return streams.emplace(device.index(), stream).first->second;
}

CopiedBatch start_copy(Batch batch, const std::optional<c10::Stream>& stream) {
  if (!stream) return {std::move(batch), nullptr};
  const torch::Device device = stream->device();
  return on_device(device, [&] {
    const c10::StreamGuard guard(*stream);
    CopiedBatch result{batch.map([&](const Tensor& each) { return each.to(device, /*non_blocking=*/true); }),
                       std::make_shared<c10::Event>(device.type())};
    result.copied->record(*stream);
    return result;
  });
}

Batch receive(CopiedBatch arriving) {
  if (!arriving.copied) return std::move(arriving.batch);
  const torch::Device device = arriving.batch.data.device();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  arriving.copied->block(stream);
  // The allocator must not hand the memory out again on the copying stream while the step still reads it.
  return arriving.batch.map([&](Tensor each) {
    each.record_stream(stream);
    return each;
  });
}

}  // namespace lockstep
