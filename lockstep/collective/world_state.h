// SPDX-License-Identifier: Apache-2.0
// collective/world_state.h: what the copies of a World share.
//
// Flow:    World::from_env, run_ranks and World::group make one -> World's calls
// Owns:    the transports
// Threads: one at a time, as World
// Ranks:   no communication
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/collective/transport.h"
#include "lockstep/launch/environment.h"
#include "lockstep/world.h"

namespace lockstep {

class WorldState {
 public:
  JobEnvironment job;    // rank, sizes and node of this world, also where it is a sub-world
  IntVector<int> nodes;  // of each rank: its machine, numbered 0, 1, ... by first appearance
  Caller caller;         // this rank, in its calls
  CoreSet cores;
  std::chrono::milliseconds timeout{};
  std::unique_ptr<Transport> cpu_transport;
  std::unique_ptr<Transport> cuda_transport;  // where the device is one

  static World world_of(std::shared_ptr<WorldState> state) { return World(std::move(state)); }

  int rank() const { return caller.rank; }
  int size() const { return caller.size; }

  // Throws DeviceError: CUDA tensors between ranks that are threads.
  Transport& transport_for(const TensorCall& call) const;

  // What this rank is in a sub-world of `ranks`, which name it; without transports.
  std::shared_ptr<WorldState> sub_world(const std::vector<int>& ranks) const;
};

// A world without transports.
std::shared_ptr<WorldState> make_world_state(const JobEnvironment& job, const WorldOptions& options);

// run_ranks over any transport: `connect` makes the transport of a rank, on that rank's thread; nodes[r] is the machine
// that rank r counts as.
using Connect = std::function<std::unique_ptr<Transport>(int rank)>;
void run_threads(const std::vector<int>& nodes, const Connect& connect, const std::function<void(World&)>& body,
                 const WorldOptions& options);

}  // namespace lockstep
