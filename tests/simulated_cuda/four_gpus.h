// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/four_gpus.h: a test binary that links the simulator and includes this has four simulated GPUs.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include <string>

#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep {

inline const int kGpuCount = simulated_cuda_make(4);

inline torch::Device gpu(int index) { return {torch::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

inline const c10::impl::VirtualGuardImpl& gpus() {
  static const c10::impl::VirtualGuardImpl kGpus(torch::kCUDA);
  return kGpus;
}

inline SimulatedCudaCounters counted(int device = -1) {
  SimulatedCudaCounters counters;
  simulated_cuda_counters(device, &counters);
  return counters;
}

inline std::string last_race() {
  std::string text(simulated_cuda_last_race(nullptr, 0), '\0');
  simulated_cuda_last_race(text.data(), text.size() + 1);
  return text;
}

}  // namespace lockstep
