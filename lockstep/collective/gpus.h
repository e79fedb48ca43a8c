// SPDX-License-Identifier: Apache-2.0
// collective/gpus.h: the GPUs of this process, as libtorch sees them: those that CUDA_VISIBLE_DEVICES leaves. Whether
// there are any is known when the program runs: a build without CUDA has none, unless a library brings its own.
//
// Flow:    libtorch -> here -> world_state.cc, strategy/devices/, train/
// Threads: any
// Ranks:   no communication
#pragma once

#include <c10/core/Event.h>
#include <torch/types.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>

#include "lockstep/error.h"
#include "lockstep/world.h"

namespace lockstep {

// Initialises CUDA: a process that has called it must not fork ranks that use a GPU.
int cuda_device_count();

// The same without that: a child process counts. Blocks until it has. Throws SystemError; DeviceError: it failed, or did
// not answer in time.
int cuda_device_count_before_fork(milliseconds timeout = std::chrono::minutes(1));

// The GPU of a local rank: that of its number; the only one, where the launcher lets each rank see one. Throws DeviceError: a
// build without CUDA, no GPU, fewer GPUs than ranks; the message shows CUDA_VISIBLE_DEVICES.
int cuda_device_index(int local_rank);

// A warning, where the machine has GPUs that this build can't use. To be called once per machine.
void hint_at_unused_gpus(const std::filesystem::path& device_files = "/dev");

DeviceError built_without_cuda();

// Throws DeviceError: there is no GPU `index`.
void require_gpus(int index);

// Tells whether `gpu` can access the memory of the other one. A copy is made by the GPU that it comes from: that one has to reach the
// other, or it goes over the host.
bool gpu_reaches(torch::Device gpu, torch::Device other);

std::pair<size_t, size_t> memory_of(torch::Device gpu);  // bytes: those that are free, and all

// Waits until what the calling thread has put on its current stream of `device` is done; nothing to do on the CPU.
void wait_for_device(torch::Device device);
// The same with a deadline. Throws DeviceError, which names the GPU that is not done by then. `timeout` is that of all ranks: a
// rank waits for its own GPU for own_share() of it, so that it names the GPU before others give up waiting for the rank.
constexpr milliseconds own_share(milliseconds timeout) { return timeout * 3 / 4; }
void wait_for_device(torch::Device device, milliseconds timeout);
inline void wait_for_device(const World& world) { wait_for_device(world.device(), world.timeout()); }

// Numbers of a GPU on their way to the host. Who waits for them waits for what the GPU had to do before them, and not for what was
// put on its streams since.
class NumbersOnTheWay {
 public:
  explicit NumbersOnTheWay(torch::Device gpu);

  // Begins to copy them, once the current stream has done what it has so far, and `work` is done. Does not block. Throws what
  // work.wait() throws.
  void start(const torch::Tensor& numbers, Work& work);

  // Returns them, on the CPU. Blocks. Throws DeviceError, as wait_for_device() does.
  const torch::Tensor& wait(milliseconds timeout) const;

 private:
  c10::Stream stream_;
  torch::Tensor copy_;
  std::optional<c10::Event> copied_;
};

// To be called while an exception is handled, of work on `gpus`, which is text: "cuda:0", or "cuda:0 or cuda:1" where it is not
// known which. What libtorch throws about a GPU does not say which: a DeviceError that does. Any other exception as it is.
std::exception_ptr current_error_on(const std::string& gpus);

// Returns what `work` returns; its exceptions are those of current_error_on().
template <class Work>
auto on_gpus(const std::string& gpus, const Work& work) {
  try {
    return work();
  } catch (...) {
    std::rethrow_exception(current_error_on(gpus));
  }
}
std::string either_of(torch::Device one, torch::Device other);
template <class Work>
auto on_device(torch::Device device, const Work& work) {
  return on_gpus(device.str(), work);
}

// Restarts the random numbers that libtorch's operators draw on this GPU.
void seed_gpu(torch::Device gpu, uint64_t seed);

// An uninitialised tensor of the same shape and dtype in pinned memory of the host, contiguous.
torch::Tensor pinned_like(const torch::Tensor& tensor);

// into = from, between any two devices, in the order of both devices' current streams of the calling thread. Where the
// one GPU can't reach the other it goes through pinned memory. Does not block. Both dense, of one shape and dtype. Between GPUs
// it throws DeviceError, which names both.
void copy_between(const torch::Tensor& into, const torch::Tensor& from);

}  // namespace lockstep
