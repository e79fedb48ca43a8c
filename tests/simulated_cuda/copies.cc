// SPDX-License-Identifier: Apache-2.0
// Copies, with the streams and waits of libtorch's own (ATen/native/cuda/Copy.cu).
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <sstream>

#include "tests/simulated_cuda/host_memory.h"
#include "tests/simulated_cuda/memory.h"
#include "tests/simulated_cuda/operators.h"
#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

std::string describe(const at::Tensor& to, const at::Tensor& from) {
  std::ostringstream text;
  text << "the copy of " << from.sizes() << " from " << from.device() << " to " << to.device();
  return text.str();
}

size_t bytes_of(const at::Tensor& tensor) { return static_cast<size_t>(tensor.nbytes()); }

// One stretch of bytes at both ends: what a DMA engine copies by itself.
bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.is_contiguous() && from.is_contiguous();
}

void count_copy(uint64_t SimulatedCudaCounters::*kind, int device, size_t bytes) {
  const Lock lock(mutex());
  SimulatedCudaCounters& count = counters(device);
  count.*kind += bytes;
  ++count.copies;
}

char* host_bytes(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

// `device_side` is the end of the copy that lies on a device.
struct HostCopy {
  std::string work;
  c10::Stream stream;
  bool is_async = false;  // the host goes on, and so must not touch its end of the copy
};

HostCopy begin_host_copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const at::Tensor& device_side = to.is_cuda() ? to : from;
  const at::Tensor& host_side = to.is_cuda() ? from : to;
  const int device = device_side.get_device();
  const HostCopy copy{describe(to, from), current_stream(device),
                      non_blocking && is_plain(to, from) && is_pinned(host_side.const_data_ptr())};
  before_copy(copy.work, device);
  return copy;
}

void copy_to_device(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const HostCopy copy = begin_host_copy(to, from, non_blocking);
  count_copy(&SimulatedCudaCounters::host_to_device, to.get_device(), bytes_of(to));
  const Moment moment = put(copy.work, copy.stream, {{to, true}});
  if (copy.is_async) {
    const Lock lock(mutex());
    auto* const real = static_cast<char*>(real_address(to.data_ptr()));
    copy_from_host({copy.work, moment, host_bytes(from), bytes_of(from)}, real, copy.stream);
    return;
  }
  host_view(to).copy_(from);
  if (!non_blocking) wait_for(copy.stream);
}

void copy_to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const HostCopy copy = begin_host_copy(to, from, non_blocking);
  count_copy(&SimulatedCudaCounters::device_to_host, from.get_device(),
             static_cast<size_t>(to.numel()) * from.element_size());
  const Moment moment = put(copy.work, copy.stream, {{from, false}});
  if (copy.is_async) {
    const Lock lock(mutex());
    const auto* const real = static_cast<const char*>(real_address(from.data_ptr()));
    copy_to_host_later({copy.work, moment, host_bytes(to), bytes_of(to)}, real, copy.stream);
    return;
  }
  wait_for(copy.stream);
  at::Tensor host = to;
  host.copy_(host_view(from));
}

void copy_between_devices(const at::Tensor& to, const at::Tensor& from) {
  const int source = from.get_device();
  const int target = to.get_device();
  const std::string work = describe(to, from);
  before_copy(work, source);
  before_copy(work, target);
  const c10::Stream reads = current_stream(source);
  const c10::Stream writes = current_stream(target);
  count_copy(peer_access(source, target) ? &SimulatedCudaCounters::device_to_device : &SimulatedCudaCounters::staged,
             source, static_cast<size_t>(to.numel()) * to.element_size());
  const Lock lock(mutex());
  if (hangs(writes)) hang_with(reads);
  wait(reads, clock_of(writes));
  put(work, reads, {{from, false}, {to, true}});
  wait(writes, clock_of(reads));
  if (hangs(reads)) hang_with(writes);
  host_view(to).copy_(host_view(from));
}

void copy_within_device(const at::Tensor& to, const at::Tensor& from) {
  const int device = to.get_device();
  const std::string work = describe(to, from);
  before_operator(work, device);
  put(work, current_stream(device), {{from, false}, {to, true}});
  {
    const Lock lock(mutex());
    ++counters(device).operators;
  }
  host_view(to).copy_(host_view(from));
}

}  // namespace

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const at::Tensor source = from.expand_as(to);
  if (to.numel() == 0 || to.is_same(source)) return to;
  if (!source.is_cuda())
    copy_to_device(to, source, non_blocking);
  else if (!to.is_cuda())
    copy_to_host(to, source, non_blocking);
  else if (to.device() != source.device())
    copy_between_devices(to, source);
  else
    copy_within_device(to, source);
  return to;
}

}  // namespace simulated_cuda
