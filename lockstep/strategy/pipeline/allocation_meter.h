// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/allocation_meter.h: how much memory the tensors of a thread take, at most.
//
// While it lives, torch tells it of every allocation and release of host tensors on its thread: what autograd keeps for
// backward is in it.
//
// Threads: belongs to the thread that makes it. What this thread allocates and another releases stays counted here
#pragma once

#include <cstdint>
#include <memory>

namespace lockstep {

class AllocationMeter {
 public:
  AllocationMeter();
  ~AllocationMeter();
  AllocationMeter(const AllocationMeter&) = delete;
  AllocationMeter& operator=(const AllocationMeter&) = delete;

  std::int64_t most_bytes() const;  // above what was there when it began

 private:
  struct Listener;
  struct Guard;
  std::shared_ptr<Listener> listener_;
  std::unique_ptr<Guard> guard_;
};

}  // namespace lockstep
