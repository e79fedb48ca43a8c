// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/allocation_meter.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>

namespace lockstep {

struct AllocationMeter::Listener : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override {
    now += size;  // negative for a release
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::int64_t now = 0;
  std::int64_t most = 0;
};

struct AllocationMeter::Guard {
  explicit Guard(const std::shared_ptr<Listener>& listener) : guard(c10::DebugInfoKind::PROFILER_STATE, listener) {}
  c10::DebugInfoGuard guard;
};

AllocationMeter::AllocationMeter()
    : listener_(std::make_shared<Listener>()), guard_(std::make_unique<Guard>(listener_)) {}
AllocationMeter::~AllocationMeter() = default;

std::int64_t AllocationMeter::most_bytes() const { return listener_->most; }

}  // namespace lockstep
