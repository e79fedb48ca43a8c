// SPDX-License-Identifier: Apache-2.0
// model/allocation_meter.h: how much memory tensors on the host, or on a GPU, take while it lives, on the thread that
// made it and on autograd's threads for its backward. What autograd keeps for backward is in it. What this thread allocates
// and another releases stays counted.
//
// Threads: used on the thread that made it
// Ranks:   no communication
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace lockstep {

class AllocationMeter {
 public:
  explicit AllocationMeter(c10::Device where = c10::kCPU) { listener_->where = where; }

  int64_t now() const { return listener_->now; }    // bytes above what was there when it began
  int64_t most() const { return listener_->most; }  // so far

 private:
  struct Listener : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device device) override {
      if (device.type() != where.type() || (!where.is_cpu() && device != where)) return;
      now += size;  // negative for a release
      most = std::max(most, now);
    }
    bool memoryProfilingEnabled() const override { return where.is_cpu(); }  // GPUs report in any case

    c10::Device where = c10::kCPU;
    int64_t now = 0;
    int64_t most = 0;
  };

  std::shared_ptr<Listener> listener_ = std::make_shared<Listener>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, listener_};
};

}  // namespace lockstep
