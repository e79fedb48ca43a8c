// SPDX-License-Identifier: Apache-2.0
// lockstep/device_place.h: where a device is: a GPU, or a set of cores.
//
// Flow:    `--devices` -> here -> StrategyOptions::places and DevicesOptions::places
// Owns:    values
// Threads: any
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include "lockstep/cores.h"

namespace lockstep {

struct DevicePlace {
  torch::Device device = torch::kCPU;  // a GPU has its number
  CoreSet cores{};                     // of a device that is cores; empty: an even share of the process's cores
  bool operator==(const DevicePlace&) const = default;
};

// "cuda:0,cuda:1": these GPUs, as CUDA_VISIBLE_DEVICES numbers them; one that is named twice has two devices.
// "cpu:0-3,cpu:4-7": these cores. Throws UsageError: anything else, and GPUs beside cores.
std::vector<DevicePlace> parse_device_places(const std::string& text);

// The name of each in messages: "cuda:1", "cpu:0" for the first set of cores. A GPU that is named before is
// "cuda:1 (device 3)".
std::vector<std::string> names_of(const std::vector<DevicePlace>& places);

// Even shares of the process's cores, or the GPUs 0 ... count-1. Throws DeviceError: fewer GPUs than that.
std::vector<DevicePlace> even_places(torch::DeviceType type, int count);

}  // namespace lockstep
