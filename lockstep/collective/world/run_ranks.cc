// SPDX-License-Identifier: Apache-2.0

#include <ATen/Parallel.h>

#include "lockstep/base/process/stop.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/transport/cpu_transport.h"
#include "lockstep/collective/world/world_state.h"

namespace lockstep {
namespace {

// The first exception of any rank: the others follow from it. A rank may report PeerLost before the lost peer reports
// its own error; that error is the cause and replaces it.
class FirstError {
 public:
  // The exception that is being handled.
  void keep(bool is_peer_lost) {
    const std::lock_guard lock(mutex_);
    if (error_ && (is_peer_lost || !is_peer_lost_)) return;
    error_ = std::current_exception();
    is_peer_lost_ = is_peer_lost;
  }
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;  // guarded by mutex_, like the next
  bool is_peer_lost_ = false;
};

void use_share_of_cores(int rank, int ranks) {
  const CoreSet mine = cores_of_rank(usable_cores(), rank, ranks);
  pin_this_thread(mine);
  at::set_num_threads(to_int(mine.size()));
}

}  // namespace

void run_threads(const std::vector<int>& nodes, const Connect& connect, const std::function<void(World&)>& body,
                 const WorldOptions& options) {
  const int ranks = to_int(nodes.size());
  FirstError first_error;
  const auto run_rank = [&](int rank) {
    const RankOfThread own;
    if (ranks > 1) stop_together();
    std::shared_ptr<WorldState> state;
    const auto give_up = [&](const std::string& reason, bool is_peer_lost = false) {
      first_error.keep(is_peer_lost);
      if (state) state->cpu_transport->fail(reason);
    };
    try {
      std::unique_ptr<Transport> transport = connect(rank);
      use_share_of_cores(rank, ranks);
      state = make_world_state(job_of_rank({.launcher = "threads"}, rank, nodes), options);
      state->nodes = nodes;
      state->cpu_transport = std::move(transport);
      World world = WorldState::world_of(state);
      body(world);
    } catch (const PeerLost& error) {
      give_up(error.what(), true);
    } catch (const std::exception& error) {
      give_up(error.what());
    } catch (...) {
      give_up("an exception that is not a std::exception");
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run_rank, rank);
  for (auto& thread : threads) thread.join();
  first_error.rethrow();
}

void run_ranks(int ranks, const std::function<void(World&)>& body, const WorldOptions& options) {
  std::vector<shm::GroupPtr> groups = shm::make_thread_group(ranks, {.timeout = options.timeout});
  const auto connect = [&](int rank) { return std::make_unique<CpuTransport>(std::move(groups[to_size(rank)])); };
  run_threads(std::vector<int>(groups.size()), connect, body, options);
}

}  // namespace lockstep
