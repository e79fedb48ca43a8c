// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include <ATen/Parallel.h>

#include "lockstep/base/to_size.h"
#include "lockstep/collective/shared_memory_transport.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/world_state.h"
#include "lockstep/error.h"
#include "lockstep/world.h"

namespace lockstep {
namespace {

bool is_peer_lost(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost&) {
    return true;
  } catch (...) {
    return false;
  }
}

// The first exception of any rank: the others follow from it. A rank may report PeerLost before the lost peer reports
// its own error; that error is the cause and replaces it.
class FirstError {
 public:
  void keep(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_ || (is_peer_lost(error_) && !is_peer_lost(error))) error_ = std::move(error);
  }
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

// `nodes`: of each rank.
JobEnvironment job_of_thread(int rank, const std::vector<int>& nodes) {
  const int node = nodes[to_size(rank)];
  JobEnvironment job;
  job.launcher = "threads";
  job.rank = rank;
  job.world_size = static_cast<int>(nodes.size());
  job.local_rank = static_cast<int>(std::count(nodes.begin(), nodes.begin() + rank, node));
  job.local_size = static_cast<int>(std::ranges::count(nodes, node));
  job.node_rank = node;
  return job;
}

void use_share_of_cores(int rank, int ranks) {
  const CoreSet mine = cores_of_rank(usable_cores(), rank, ranks);
  pin_this_thread(mine);
  at::set_num_threads(static_cast<int>(mine.size()));
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void run_threads(const std::vector<int>& nodes, const Connect& connect, const std::function<void(World&)>& body,
                 const WorldOptions& options) {
  const int ranks = static_cast<int>(nodes.size());
  FirstError first_error;
  const auto run_rank = [&](int rank) {
    std::shared_ptr<WorldState> state;
    Transport* connection = nullptr;
    try {
      std::unique_ptr<Transport> transport = connect(rank);
      connection = transport.get();
      use_share_of_cores(rank, ranks);
      state = make_world_state(job_of_thread(rank, nodes), options);
      state->nodes = nodes;
      state->cpu_transport = std::move(transport);
      World world = WorldState::world_of(state);
      body(world);
    } catch (...) {
      first_error.keep(std::current_exception());
      if (state) connection->fail(message_of(std::current_exception()));
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run_rank, rank);
  for (auto& thread : threads) thread.join();
  first_error.rethrow();
}

void run_ranks(int ranks, const std::function<void(World&)>& body, const WorldOptions& options) {
  std::vector<shm::Group> groups = shm::make_thread_group(ranks, {.timeout = options.timeout});
  const auto connect = [&](int rank) {
    return std::make_unique<SharedMemoryTransport>(std::move(groups[to_size(rank)]));
  };
  run_threads(std::vector<int>(groups.size()), connect, body, options);
}

}  // namespace lockstep
