// SPDX-License-Identifier: Apache-2.0
// collective/gpus.h: the GPUs of this process, as libtorch sees them: those that CUDA_VISIBLE_DEVICES leaves. Whether
// there are any is known when the program runs: a build without CUDA has none, unless a library brings its own.
//
// Flow:    libtorch -> here -> world_state.cc, strategy/devices/, train/
// Threads: any
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>

#include "lockstep/error.h"

namespace lockstep {

// Initialises CUDA: a process that has called it must not fork ranks that use a GPU.
int cuda_device_count();

// The same without that: a child process counts. Blocks until it has. Throws SystemError; DeviceError: it failed, or did
// not answer in time.
int cuda_device_count_before_fork(std::chrono::milliseconds timeout = std::chrono::minutes(1));

// The GPU of a local rank: that of its number; the only one, where the launcher lets each rank see one. Throws DeviceError: a
// build without CUDA, no GPU, fewer GPUs than ranks; the message shows CUDA_VISIBLE_DEVICES.
int cuda_device_index(int local_rank);

DeviceError built_without_cuda();

// Throws DeviceError: there is no GPU `index`.
void require_gpus(int index);

// Whether one GPU can copy from the other without a detour over the host.
bool gpus_reach_each_other(torch::Device one, torch::Device other);

struct GpuMemory {
  std::int64_t free = 0;  // bytes
  std::int64_t all = 0;
};
GpuMemory memory_of(torch::Device gpu);

// Waits until what the calling thread has put on its current stream of `device` is done; nothing to do on the CPU.
void wait_for_device(torch::Device device);
// The same with a deadline. Throws DeviceError, which names the GPU that is not done by then. `timeout` is that of all ranks: a
// rank waits for its own GPU for own_share() of it, so that it names the GPU before others give up waiting for the rank.
constexpr std::chrono::milliseconds own_share(std::chrono::milliseconds timeout) { return timeout * 3 / 4; }
void wait_for_device(torch::Device device, std::chrono::milliseconds timeout);

// To be called while an exception is handled, of work on `device`. What libtorch throws about a GPU does not say which: a
// DeviceError that does. Any other exception as it is.
std::exception_ptr current_error_on(torch::Device device);

// What `work` returns; its exceptions are those of current_error_on().
template <class Work>
auto on_device(torch::Device device, const Work& work) {
  try {
    return work();
  } catch (...) {
    std::rethrow_exception(current_error_on(device));
  }
}

// Restarts the random numbers that libtorch's operators draw on this GPU.
void seed_gpu(torch::Device gpu, std::uint64_t seed);

// An uninitialised tensor of the same shape and dtype in pinned memory of the host, contiguous.
torch::Tensor pinned_like(const torch::Tensor& tensor);

// into = from, between any two devices, in the order of both devices' current streams of the calling thread. Where the
// GPUs can't reach each other it goes through pinned memory. Does not block. Both dense, of one shape and dtype.
void copy_between(const torch::Tensor& into, const torch::Tensor& from);

}  // namespace lockstep
