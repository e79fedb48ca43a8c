// SPDX-License-Identifier: Apache-2.0
#include "tests/simulated_cuda/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

#include "tests/simulated_cuda/region.h"
#include "tests/simulated_cuda/simulator.h"
#include "tests/simulated_cuda/traps.h"

namespace simulated_cuda {
namespace {

// Never destroyed: tensors of static storage are freed late.
struct DeviceState {
  explicit DeviceState(int device) : region(device) {}
  Region region;
  std::vector<Block> freed;  // freed while other streams may still have used them
};

std::vector<std::unique_ptr<DeviceState>>& states() {
  static auto* const kStates = new std::vector<std::unique_ptr<DeviceState>>(static_cast<size_t>(device_count()));
  return *kStates;
}

DeviceState& state(int device) {
  auto& made = states().at(static_cast<size_t>(device));
  if (!made) {
    explain_faults();
    made = std::make_unique<DeviceState>(device);
  }
  return *made;
}

std::map<const char*, Block>& blocks() {
  static auto* const kBlocks = new std::map<const char*, Block>;
  return *kBlocks;
}

bool is_recorded(const Block& block, const Use& use) {
  return std::ranges::any_of(block.recorded, [&](const auto& stream) {
    return now_on(c10::Stream(c10::Stream::UNSAFE, device_of(stream.first), stream.second)).stream == use.moment.stream;
  });
}

// Memory that is free may be given to the next allocation on its stream: all work on it must be over by then.
std::string race_of_reuse(const Block& block, const c10::Stream& stream) {
  for (const Use& use : block.uses)
    if (!is_recorded(block, use) && !ordered(use.moment, stream))
      return "lockstep simulator: memory was freed too early: " + use.work + " on " + name_of(use.moment) +
             " may still be at work on it\n  here:   an allocation on " + name_of(stream) + " may get its memory" +
             "\n  likely: a tensor made on one stream was used on another and dropped" +
             "\n  next:   tensor.record_stream() with the stream that uses it, or wait for that stream first";
  return {};
}

void check_reuse(DeviceState& device, const c10::Stream& stream) {
  std::string race;
  std::erase_if(device.freed, [&](const Block& block) {
    if (block.stream != stream) return false;
    if (race.empty()) race = race_of_reuse(block, stream);
    return true;
  });
  report_race(race);
}

[[noreturn]] void throw_out_of_memory(int device, size_t bytes, const Region& region) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", device,
                   " has a total capacity of ", region.limit(), " bytes of which ", region.limit() - region.live(),
                   " are free (simulated).");
  std::abort();
}

char* allocate_on(int device, size_t bytes) {
  const Lock lock(mutex());
  const c10::Stream stream = current_stream(device);
  DeviceState& on = state(device);
  check_reuse(on, stream);
  char* const at = allocation_fails(device) ? nullptr : on.region.take(bytes);
  if (at == nullptr) throw_out_of_memory(device, bytes, on.region);
  // Work of this stream may still use what lay here before.
  blocks().emplace(at, Block{stream, bytes, {{"the allocation", now_on(stream), 0, bytes, true}}});
  SimulatedCudaCounters& count = counters(device);
  count.allocated = on.region.live();
  count.peak = std::max(count.peak, count.allocated);
  c10::reportMemoryUsageToProfiler(at, static_cast<int64_t>(bytes), count.allocated, on.region.limit(),
                                   device_of(device));
  return at;
}

void free_block(void* address) {
  const Lock lock(mutex());
  const auto at = blocks().find(static_cast<const char*>(address));
  if (at == blocks().end()) return;
  const int device = at->second.stream.device_index();
  DeviceState& on = state(device);
  on.region.give_back(static_cast<char*>(address), at->second.bytes);
  if (!race_of_reuse(at->second, at->second.stream).empty()) on.freed.push_back(at->second);
  const auto bytes = static_cast<int64_t>(at->second.bytes);
  blocks().erase(at);
  counters(device).allocated = on.region.live();
  c10::reportMemoryUsageToProfiler(address, -bytes, on.region.live(), on.region.limit(), device_of(device));
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    if (bytes == 0) return {nullptr, nullptr, &free_block, device_of(device)};
    char* const at = allocate_on(device, bytes);
    return {at, at, &free_block, device_of(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(real_address(to), real_address(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override { record_stream(pointer.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock lock(mutex());
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = static_cast<int64_t>(counters(device).allocated);
    stats.allocated_bytes[0].peak = static_cast<int64_t>(counters(device).peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const Lock lock(mutex());
    counters(device).peak = counters(device).allocated;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const Lock lock(mutex());
    const Region& region = state(device).region;
    return {region.limit() - region.live(), region.limit()};
  }
};

}  // namespace

std::optional<Place> place_of(const void* address) {
  const auto* const at = static_cast<const char*>(address);
  auto after = blocks().upper_bound(at);
  if (after == blocks().begin()) return {};
  auto& [begin, block] = *std::prev(after);
  if (at >= begin + block.bytes) return {};
  return Place{&block, static_cast<size_t>(at - begin)};
}

int device_of_address(const void* address) {
  const Lock lock(mutex());
  for (int device = 0; device < device_count(); ++device) {
    const auto& made = states()[static_cast<size_t>(device)];
    if (made && made->region.contains(address)) return device;
  }
  return -1;
}

void* real_address(const void* address) {
  const int device = device_of_address(address);
  if (device < 0) return const_cast<void*>(address);
  const Lock lock(mutex());
  return state(device).region.real(address);
}

void record_stream(const void* address, const c10::Stream& stream) {
  const Lock lock(mutex());
  if (leave_out("record_stream", stream.device_index())) return;
  if (const auto place = place_of(address)) place->block->recorded.emplace(stream.device_index(), stream.id());
}

c10::Allocator* device_memory() {
  static DeviceMemory memory;
  return &memory;
}

}  // namespace simulated_cuda

extern "C" void simulated_cuda_limit(int device, size_t bytes) {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  simulated_cuda::state(device).region.set_limit(bytes);
}
