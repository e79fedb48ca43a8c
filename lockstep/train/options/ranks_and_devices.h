// SPDX-License-Identifier: Apache-2.0
// train/options/ranks_and_devices.h: how many ranks there are, which of them are servers, and which devices each one has, from
// --ranks, --servers, --devices-per-worker, --devices and the launcher's variables.
//
// Flow:    TrainOptions + JobEnvironment -> here -> the launcher, World and StrategyOptions
// Threads: any
// Ranks:   every rank finds the same, from the same command line
#pragma once

#include <vector>

#include "agent/clusters/environment.h"
#include "lockstep/device_place.h"
#include "lockstep/train/options/options.h"

namespace lockstep {

// The kind that --devices or --device says; nothing: GPUs if there are enough. Throws UsageError.
std::optional<torch::DeviceType> wanted_kind(const TrainOptions& options);

// The ranks that are servers, beside the workers that --ranks counts.
int server_count(const TrainOptions& options);

// The ranks to start where no launcher has started any. Throws UsageError, DeviceError. May count GPUs, in a child process.
int ranks_to_start(const TrainOptions& options);

// The devices that share a global batch, over `ranks` ranks.
int devices_in_all(const TrainOptions& options, int ranks);

// The first ranks of each machine that the launcher started as servers, or the first of all.
bool is_server(const TrainOptions& options, const JobEnvironment& job);

// The places of this rank's devices: one at least. A server has the CPU. Throws UsageError, DeviceError. May initialise CUDA.
std::vector<DevicePlace> places_of_rank(const TrainOptions& options, const JobEnvironment& job);

}  // namespace lockstep
