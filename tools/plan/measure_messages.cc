// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/measured_steps.h"

#include <ctime>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/base/median.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/hierarchy.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/world/world_state.h"
#include "tools/plan/simulation.h"

namespace lockstep::plan {
namespace {

constexpr std::array kMessages{1 << 10, 1 << 15, 1 << 20, 1 << 23};  // bytes that are all-reduced

double cpu_seconds() {  // of this process
  return to_double(std::clock()) / CLOCKS_PER_SEC;
}

// Measures all_reduce of each size: the median of its seconds, and the seconds that cores work for one in all threads of this process.
void measure_all_reduce(const World& world, Profile& profile) {
  constexpr int kTimed = 10, kTimedIfSmall = 60;  // small ones vary most
  for (const int bytes : kMessages) {
    const Tensor data = world.allocate({bytes / 4}, torch::kFloat32).zero_();
    const int rounds = bytes < 1 << 20 ? kTimedIfSmall : kTimed;
    std::vector<double> seconds;
    for (int i = 0; i < rounds; ++i) {
      world.barrier();
      const Stopwatch watch;
      world.all_reduce(data);
      seconds.push_back(largest_of(world, watch.seconds()));
    }
    world.barrier();
    const double before = cpu_seconds();
    for (int i = 0; i < rounds; ++i) world.all_reduce(data);
    world.barrier();
    const double work = (cpu_seconds() - before) / rounds;
    if (world.rank() > 0) continue;
    profile.loopback.push_back({.bytes = 1.0 * bytes, .seconds = median(seconds)});
    profile.loopback_work.push_back({.bytes = 1.0 * bytes, .seconds = work});
  }
}

// Runs `body` in threads of this process, each of which counts as a machine.
void run_machines(int count, const std::function<void(World&)>& body) {
  const Ids machines = consecutive(0, count);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto connect = [&](int rank) -> std::unique_ptr<Transport> {
    auto inside = shm::make_thread_group(1, {.timeout = std::chrono::seconds(30), .job_ranks = {rank}});
    return std::make_unique<Hierarchy>(
        std::move(inside[0]), Topology{machines}, store,
        TransportOptions{.rank = rank, .size = count, .describe = concat("rank ", rank)});
  };
  run_threads(machines, connect, body, {.timeout = std::chrono::seconds(30)});
}

}  // namespace

// Both ends of all connections are in this process: 12 between four machines, 2 between two, each of them twice (between all ranks,
// and between machines). All other memory is the same for two and four machines.
void measure_messages(Profile& profile) {
  double of_two = 0;  // bytes
  for (const int machines : {2, 4})
    run_machines(machines, [&](World& world) {
      world.all_reduce(world.allocate({kMessages.front() / 4}, torch::kFloat32).zero_());
      world.barrier();
      if (world.rank() > 0) return;
      const double own = own_bytes();
      if (machines == 4) profile.connection_bytes = std::max(0.0, own - of_two) / (2 * (4 * 3 - 2));
      of_two = own;
    });
  run_machines(2, [&](World& world) { measure_all_reduce(world, profile); });
}

}  // namespace lockstep::plan
