// SPDX-License-Identifier: Apache-2.0
// train/state/generators.h: the states of torch's random generators that a rank draws from.
//
// Threads: one thread draws meanwhile
#pragma once

#include <ATen/Context.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/world.h"

namespace lockstep {

// The CPU, and this rank's GPU where it has one.
inline std::vector<torch::Device> devices_with_generators(const World& world) {
  std::vector<torch::Device> devices{torch::kCPU};
  if (!world.device().is_cpu()) devices.push_back(world.device());
  return devices;
}

// Names in a file, such as "rng.cpu.0" of rank 0.
inline const std::string kGenerator = "rng.";
inline std::string generator_name(torch::Device device, int rank) {
  return concat(kGenerator, c10::DeviceTypeName(device.type(), /*lower_case=*/true), ".", rank);
}

inline Tensor generator_state(torch::Device device) { return at::globalContext().defaultGenerator(device).get_state(); }

inline std::map<std::string, Tensor> generators_of(const World& world) {
  std::map<std::string, Tensor> states;
  for (const torch::Device device : devices_with_generators(world))
    states[generator_name(device, world.rank())] = generator_state(device);
  return states;
}

inline void set_generator_state(torch::Device device, const Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace lockstep
