// SPDX-License-Identifier: Apache-2.0
// collective/world/world_state.h: what the copies of a World share.
//
// Flow:    World::from_env, run_ranks and World::group make one -> World's calls
// Owns:    the transports
// Threads: one at a time, as World
// Ranks:   no communication
#pragma once

#include "agent/clusters/environment.h"
#include "lockstep/base/process/stoppable.h"
#include "lockstep/collective/traced_messages.h"
#include "lockstep/collective/transport/transport.h"
#include "lockstep/world.h"

namespace lockstep {

class WorldState {
 public:
  JobEnvironment job;                  // rank, sizes and node of this world, also where it is a sub-world
  std::optional<bool> serves;          // whether the launcher has made this process a server; none: it did not say
  IntVector<int> nodes;                // of each rank: its machine, numbered 0, 1, ... by first appearance
  torch::Device device = torch::kCPU;  // where this rank's tensors belong; those on the CPU are fine too
  std::string here;                    // "rank 2 of 4 on gpu-a", for messages
  CoreSet cores;
  milliseconds timeout{};
  OwnedHere<Transport> cpu_transport;
  OwnedHere<Transport> cuda_transport;  // where the device is one

  // A world of `size` ranks that meet at `store`, all of which call it; the store is not used for anything else. The
  // launcher's variables say which machine this is. Blocks until all are connected. Throws RendezvousError.
  static World over_store(const StorePtr& store, int rank, int size, const WorldOptions& options = {});

  // As World::from_env, but traces nothing by itself.
  static World from_env(const WorldOptions& options);

  // Makes the World, once its transports are set. stop() ends it from now on.
  static World world_of(std::shared_ptr<WorldState> state);

  static const WorldState& of(const World& world) { return *world.state_; }

  int rank() const { return job.rank; }
  int size() const { return job.world_size; }

  // Throws DeviceError: CUDA tensors between ranks that are threads. UsageError: a forked child.
  Transport& transport_for(const TensorCall& call) const;

  // This rank in a sub-world of `ranks`, which name it.
  std::shared_ptr<WorldState> sub_world(const std::vector<int>& ranks, std::unique_ptr<Transport> transport) const;

  void abandon(const std::string& reason) const;  // as World

  int run(const TensorCall& call);  // blocks until it is done; returns who sent it, of a receive

  std::shared_ptr<MessageGroup> messages = std::make_shared<MessageGroup>();
  void count_sub_world() { ++sub_worlds_; }  // all ranks of this world make it, those that are not in it, too

 private:
  uint64_t sub_worlds_ = 0;
  std::optional<Stoppable> stoppable_;  // the last member
};

// `job` of another rank of those whose machines are `nodes`.
JobEnvironment job_of_rank(JobEnvironment job, int rank, const IntVector<int>& nodes);

// A world without transports, unless it has one rank.
std::shared_ptr<WorldState> make_world_state(const JobEnvironment& job, const WorldOptions& options);

// run_ranks over any transport: `connect` makes the transport of a rank, on that rank's thread; nodes[r] is the machine
// that rank r counts as.
using Connect = std::function<std::unique_ptr<Transport>(int rank)>;
void run_threads(const std::vector<int>& nodes, const Connect& connect, const std::function<void(World&)>& body,
                 const WorldOptions& options);

}  // namespace lockstep
