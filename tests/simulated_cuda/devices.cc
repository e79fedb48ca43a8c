// SPDX-License-Identifier: Apache-2.0
// The devices, streams and events as c10 asks for them, and CUDA's hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <map>
#include <vector>

#include "tests/simulated_cuda/happens_before.h"
#include "tests/simulated_cuda/host_memory.h"
#include "tests/simulated_cuda/memory.h"
#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

using std::chrono::steady_clock;

thread_local int device_of_thread = 0;
thread_local std::map<int, c10::StreamId> streams_of_thread;  // 0, the default stream, where a device is not here

struct Event {
  Clock clock;
  c10::Stream stream;
  bool hangs = false;
  steady_clock::time_point time = steady_clock::now();
};

// Another thread may record it again.
Event copy_of(void* event) {
  const Lock lock(mutex());
  return *static_cast<Event*>(event);
}

int checked(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "CUDA error: invalid device ordinal: cuda:", device, " of ",
              device_count(), " devices (simulated)");
  return device;
}

int or_current(c10::DeviceIndex device) { return device < 0 ? device_of_thread : checked(device); }

void host_waited(const c10::Stream& stream, const Clock& clock) {
  const Lock lock(mutex());
  ++counters(stream.device_index()).host_waits;
  host_waits(clock);
  land_copies();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_of(device_of_thread); }
  void setDevice(c10::Device device) const override { device_of_thread = or_current(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_of_thread = device.index();
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(or_current(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(or_current(device.index())); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams_of_thread[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const Lock lock(mutex());
    delete static_cast<Event*>(*event);
    *event = new Event{clock_of(stream), stream, hangs(stream)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const Lock lock(mutex());
    const Event& of = *static_cast<Event*>(event);
    if (of.stream == stream || leave_out("event", stream.device_index())) return;
    ++counters(stream.device_index()).stream_waits;
    if (of.hangs) hang_with(stream);
    wait(stream, of.clock);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const Event of = copy_of(event);
    if (of.hangs && hangs(of.stream)) return false;
    host_learns(of.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Event of = copy_of(event);
    if (leave_out("host", of.stream.device_index())) return;
    if (of.hangs) wait_while_it_hangs(of.stream);
    host_waited(of.stream, of.clock);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    const auto time = [](void* event) { return static_cast<Event*>(event)->time; };
    return std::chrono::duration<double, std::milli>(time(second) - time(first)).count();
  }

  bool queryStream(const c10::Stream& stream) const override {
    if (hangs(stream)) return false;
    const Lock lock(mutex());
    host_learns(clock_of(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (!leave_out("host", stream.device_index())) wait_for(stream);
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    const int device = or_current(index);
    if (leave_out("host", device)) return;
    wait_while_it_hangs(c10::Stream(c10::Stream::DEFAULT, device_of(device)));
    const Lock lock(mutex());
    ++counters(device).host_waits;
    for (const c10::Stream& stream : streams_of(device)) host_waits(clock_of(stream));
    land_copies();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer.get(), stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    before_count();
    return static_cast<c10::DeviceIndex>(device_count());
  }

 private:
  static void host_learns(const Clock& clock) {
    const Lock lock(mutex());
    host_waits(clock);
    land_copies();
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return device_count() > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(device_of_thread); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_of_thread = checked(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_memory(); }
  c10::Device getDeviceFromPtr(void* address) const override {
    const int device = device_of_address(address);
    TORCH_CHECK(device >= 0,
                "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return device_of(device);
  }
  // Each device has a seed of its own; the numbers are those of the host's generator, which operators on it fall back to.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* const kAll = [] {
      auto* const all = new std::vector<at::Generator>;
      for (int i = 0; i < device_count(); ++i) all->push_back(at::detail::createCPUGenerator());
      return all;
    }();
    return kAll->at(static_cast<size_t>(or_current(device)));
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

const bool kAllocatorIsSet = [] {
  c10::SetAllocator(kCuda, device_memory());
  return true;
}();

}  // namespace

int current_device() { return device_of_thread; }

c10::Device device_of(int index) { return {kCuda, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream current_stream(int device) {
  const auto found = streams_of_thread.find(device);
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), found == streams_of_thread.end() ? 0 : found->second);
}

c10::Stream new_stream(int device) {
  static std::atomic<c10::StreamId> next{1};
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), next++);
}

void wait_for(const c10::Stream& stream) {
  wait_while_it_hangs(stream);
  const Lock lock(mutex());
  host_waited(stream, clock_of(stream));
}

}  // namespace simulated_cuda

namespace at {
using CUDAHooks = simulated_cuda::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
}  // namespace at
