// SPDX-License-Identifier: Apache-2.0
// train/state/generators.h: the states of torch's random generators that a rank draws from.
//
// Threads: one thread draws meanwhile
#pragma once

#include <ATen/Context.h>

#include <mutex>
#include <vector>

#include "lockstep/world.h"

namespace lockstep {

// The CPU, and this rank's GPU where it has one.
inline std::vector<torch::Device> devices_with_generators(const World& world) {
  std::vector<torch::Device> devices{torch::kCPU};
  if (!world.device().is_cpu()) devices.push_back(world.device());
  return devices;
}

inline torch::Tensor generator_state(torch::Device device) {
  return at::globalContext().defaultGenerator(device).get_state();
}

inline void set_generator_state(torch::Device device, const torch::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace lockstep
