// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/gpus.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "lockstep/base/log.h"
#include "lockstep/base/pipe.h"
#include "lockstep/base/process/machine_gpus.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

std::string visible_devices() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return concat("CUDA_VISIBLE_DEVICES=", visible != nullptr ? visible : "(not set)");
}

DeviceError no_count(const std::string& what) {
  return DeviceError({.what = concat("the GPUs of this machine could not be counted: ", what),
                      .here = visible_devices(),
                      .likely = "the GPU driver hangs, or does not fit this CUDA",
                      .next = "see whether nvidia-smi answers; or use --devices cpu"});
}

// Reads the answer of the process that counts GPUs. One that hangs is ended; the kernel may keep it until the driver lets
// go of it.
int answer_of(pid_t child, int read_end, milliseconds timeout) {
  if (!wait_for(POLLIN, read_end, Deadline::after(timeout))) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, WNOHANG);
    throw no_count("no answer within " + human_seconds(timeout));
  }
  int count = 0;
  const auto got = ::read(read_end, &count, sizeof(count));
  ::waitpid(child, nullptr, 0);
  if (got != sizeof(count)) throw no_count("the process that counts them failed");
  return count;
}

}  // namespace

int cuda_device_count() {
  if (!c10::impl::hasDeviceGuardImpl(torch::kCUDA)) return 0;
  return c10::impl::VirtualGuardImpl(torch::kCUDA).deviceCount();
}

void hint_at_unused_gpus(const std::filesystem::path& device_files) {
  if (c10::impl::hasDeviceGuardImpl(torch::kCUDA) || !machine_has_gpus(device_files)) return;
  log_warning(
      "this machine has GPUs, but this lockstep was built without CUDA: it trains on cores (`make cuda` builds it with "
      "CUDA)");
}

int cuda_device_count_before_fork(milliseconds timeout) {
  if (!c10::impl::hasDeviceGuardImpl(torch::kCUDA)) return 0;
  auto [read_end, write_end] = make_pipe();
  const pid_t child = ::fork();
  if (child < 0) throw system_error("fork", "a process that counts GPUs");
  if (child == 0) {
    const int count = cuda_device_count();
    const auto written = ::write(write_end.get(), &count, sizeof(count));
    ::_exit(written == sizeof(count) ? 0 : 1);
  }
  write_end.reset();
  return answer_of(child, read_end.get(), timeout);
}

DeviceError built_without_cuda() {
  return DeviceError({.what = "this lockstep was built without CUDA",
                      .likely = "--devices cuda with the release preset",
                      .next = "build the cuda preset (`make cuda`), or use --devices cpu"});
}

void require_gpus(int index) {
  if (!c10::impl::hasDeviceGuardImpl(torch::kCUDA)) throw built_without_cuda();
  if (const int count = cuda_device_count(); index >= count)
    throw DeviceError({.what = concat("there is no GPU cuda:", index, ": ", count, " visible"),
                       .here = visible_devices(),
                       .likely = "more devices or ranks on this machine than GPUs, or none is visible",
                       .next = "name fewer devices, change CUDA_VISIBLE_DEVICES, or use --devices cpu"});
}

int cuda_device_index(int local_rank) {
  require_gpus(0);
  // The launcher lets this rank see one GPU of its own, as Slurm's --gpus-per-task does.
  if (cuda_device_count() == 1 && std::getenv("CUDA_VISIBLE_DEVICES") != nullptr) return 0;
  require_gpus(local_rank);
  return local_rank;
}

bool gpu_reaches(torch::Device gpu, torch::Device other) {
  if (gpu == other) return true;
  int can = 0;
  // libtorch_cpu loads the CUDA runtime in every build. nullptr: it has no such function.
  const auto ask = reinterpret_cast<int (*)(int*, int, int)>(::dlsym(RTLD_DEFAULT, "cudaDeviceCanAccessPeer"));
  return ask != nullptr && ask(&can, gpu.index(), other.index()) == 0 && can != 0;
}

std::pair<size_t, size_t> memory_of(torch::Device gpu) {
  return c10::getDeviceAllocator(gpu.type())->getMemoryInfo(gpu.index());
}

void wait_for_device(torch::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl of(device.type());
  of.synchronizeStream(of.getStream(device));
}

namespace {

void wait_until(const auto& is_done, torch::Device device, milliseconds timeout) {
  constexpr std::chrono::microseconds kLongestNap{100};
  timeout = own_share(timeout);
  const Deadline deadline = Deadline::after(timeout);
  for (std::chrono::microseconds nap{5}; !is_done(); nap = std::min(2 * nap, kLongestNap)) {
    if (deadline.passed())
      throw DeviceError(
          {.what = concat(device.str(), " is not done within ", human_seconds(timeout)),
           .likely = "a GPU that hangs, a function of the task that does, or a step that takes longer than that",
           .next = "see whether nvidia-smi answers, or give a longer --timeout"});
    std::this_thread::sleep_for(nap);
  }
}

}  // namespace

void wait_for_device(torch::Device device, milliseconds timeout) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl of(device.type());
  wait_until([&, stream = of.getStream(device)] { return of.queryStream(stream); }, device, timeout);
}

NumbersOnTheWay::NumbersOnTheWay(torch::Device gpu)
    : stream_(c10::impl::VirtualGuardImpl(gpu.type()).getStreamFromGlobalPool(gpu)) {}

void NumbersOnTheWay::start(const torch::Tensor& numbers, Work& work) {
  const c10::impl::VirtualGuardImpl of(stream_.device_type());
  c10::Event made(stream_.device_type());
  made.record(of.getStream(stream_.device()));
  made.block(stream_);
  const c10::StreamGuard guard(stream_);
  work.wait();  // on stream_, for NCCL's
  copy_ = pinned_like(numbers);
  copy_.copy_(numbers, /*non_blocking=*/true);
  numbers.record_stream(stream_);
  copied_.emplace(stream_.device_type());
  copied_->record(stream_);
}

const torch::Tensor& NumbersOnTheWay::wait(milliseconds timeout) const {
  wait_until([this] { return copied_->query(); }, stream_.device(), timeout);
  return copy_;
}

std::exception_ptr current_error_on(const std::string& gpus) {
  const auto named = [&](const std::exception& error, const std::string& likely, const std::string& next) {
    const std::string what = concat(gpus, " failed: ", first_line_of(error));
    return std::make_exception_ptr(DeviceError({.what = what, .likely = likely, .next = next}));
  };
  const std::exception_ptr current = std::current_exception();
  try {
    std::rethrow_exception(current);
  } catch (const c10::OutOfMemoryError& error) {
    return named(error, "a model or a batch that is too large for it, or another program on it",
                 "give a smaller --batch-size or more devices, or cut the model: --strategy pipeline");
  } catch (const c10::AcceleratorError& error) {
    return named(error, "an error in a kernel or of the hardware, of this operator or of one before it",
                 "look for NVRM in the kernel's log; CUDA_LAUNCH_BLOCKING=1 shows the operator; --resume goes on");
  } catch (...) {
    return current;
  }
}

std::string either_of(torch::Device one, torch::Device other) {
  return one == other ? one.str() : concat(one.str(), " or ", other.str());
}

void seed_gpu(torch::Device gpu, uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(gpu);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

torch::Tensor pinned_like(const torch::Tensor& tensor) {
  return torch::empty(tensor.sizes(), torch::TensorOptions(tensor.scalar_type()).pinned_memory(true));
}

namespace {

void copy_over_host(const torch::Tensor& into, const torch::Tensor& from) {
  const c10::impl::VirtualGuardImpl of(from.device().type());
  const torch::Tensor host = pinned_like(from);
  host.copy_(from, /*non_blocking=*/true);
  c10::Event arrived(from.device().type());
  arrived.record(of.getStream(from.device()));
  arrived.block(of.getStream(into.device()));
  into.copy_(host, /*non_blocking=*/true);
}

}  // namespace

void copy_between(const torch::Tensor& into, const torch::Tensor& from) {
  const torch::Device to = into.device(), source = from.device();
  if (to.is_cpu() || source.is_cpu()) {
    into.copy_(from, /*non_blocking=*/true);
    return;
  }
  on_gpus(either_of(to, source), [&] {  // asks as libtorch does before it copies
    gpu_reaches(source, to) ? static_cast<void>(into.copy_(from, /*non_blocking=*/true)) : copy_over_host(into, from);
  });
}

}  // namespace lockstep
