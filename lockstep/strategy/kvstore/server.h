// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/server.h: one server of a distributed store (Li et al., OSDI 2014).
//
//   worker 0 ---- link ---- thread 0 --\                        dist_sync     merges when all workers have pushed
//   worker 1 ---- link ---- thread 1 ---+--> table + optimizer  dist_async    updates with each push as it arrives
//   worker 2 ---- link ---- thread 2 --/        (one lock)      dist_bounded  the same, within the staleness bound
//
// One thread per client. Its loop:
//
//   1. receive a request                  blocks on the link, without the lock
//   2. receive the payload                without the lock, into memory that belongs to this client alone
//   3. take the lock, and wait until the kind of store lets the request proceed
//   4. merge, update, or copy values out  under the lock: no two updates at the same time
//   5. release the lock, send the reply   from the client's own outbox
//
// No thread sends or receives while it holds the lock, so a slow or lost client delays only those that the kind
// lets wait for it. Every wait in 3 ends. dist_sync: workers push the same keys in the same order, so the worker that is
// furthest behind never waits, and its pushes end the others' waits. dist_bounded: see staleness_gate.h. If a client does
// not come, its link's timeout ends the wait.
//
// Flow:    messages.h -> here -> server_table.h -> optimizer/
// Owns:    the table, its threads, its ends of the links
// Threads: all functions from any
// Ranks:   a server
//
// Who is lost: links have connections of their own, so each client's loss is noticed by its thread alone: within 100 ms
// if it was killed, after its link's timeout if it is silent. dist_sync: everything ends with PeerLost, here and at the
// workers. dist_async and dist_bounded: the others go on; without any worker left it ends with PeerLost.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/received.h"
#include "lockstep/batch_totals.h"
#include "lockstep/error.h"
#include "lockstep/strategy/kvstore/messages.h"
#include "lockstep/strategy/kvstore/server_table.h"
#include "lockstep/strategy/kvstore/staleness_gate.h"
#include "lockstep/strategy/kvstore/statistics.h"

namespace lockstep {

class StoreServer {
  using Lock = std::unique_lock<std::mutex>;

 public:
  explicit StoreServer(const DistSetting& setting);

  // Blocks until every client has left or is lost. While an exception is in flight the clients are told at once.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  // Blocks until every worker that is still there has pushed gradients `pushes` times and they are applied. Returns the
  // samples and mean loss of each worker's push of that number. Throws PeerLost.
  BatchTotals wait_for_pushes(std::int64_t pushes);

  // Blocks until every worker has left or is lost. Throws PeerLost.
  void wait_for_goodbyes();

  StoreStatistics statistics() const {
    const Lock lock(mutex_);
    return statistics_;
  }

  // The layout; copies of all slices' states, after `pushes` pushes of every worker that is still there. Block until
  // the store has its keys. Throw PeerLost.
  BlockLayout layout();
  std::vector<SliceState> states(std::int64_t pushes = 0);
  void set_states(const std::vector<SliceState>& states);

 private:
  struct Client {
    Link link;
    std::thread thread{};
    torch::Tensor outbox{};
    bool here = true;
    int pending = 0;            // pushes of trained keys that are complete and not applied
    std::int64_t pushes = 0;    // those that are applied
    RequestHeader last_push{};  // the newest of trained keys
  };

  KVStoreKind kind() const { return setting_.options.kvstore.kind; }
  int workers() const { return static_cast<int>(setting_.workers.size()); }
  bool is_worker(int client) const { return client < workers(); }
  bool any_worker_here() const;
  std::string name_of(int client) const;

  // ---- server_requests.cc: each on its client's thread
  void serve(int client);
  void handle(int client, const RequestHeader& request);
  void check(int client, const RequestHeader& request) const;
  void check_rows(const Received& sender, const RequestHeader& request) const;
  void create(int worker, const RequestHeader& request);
  void set_optimizer(int worker);
  void push(int worker, const RequestHeader& request);
  void send_merged(int worker, std::span<const SliceRange> parts, bool all, std::vector<Pending>& replies);
  torch::Tensor place_for(int worker, const RequestHeader& request, SliceRange slices) const;
  void unpack(int worker, const RequestHeader& request, SliceRange slices, const torch::Tensor& words) const;
  void add_push(int worker, const RequestHeader& request, SliceRange slices, const torch::Tensor& values,
                std::span<const std::uint8_t> has_value);
  void merge(const RequestHeader& request, SliceRange slices);
  void apply(Lock& lock, int worker, const RequestHeader& request);
  double share_of(int worker) const;
  void count_push(int worker);
  torch::Tensor read(int worker, SliceRange slices);
  void pull(int worker, const RequestHeader& request);
  void pull_rows(int worker, const RequestHeader& request);
  void send_states(int client, const RequestHeader& request);

  // ---- Waits, and lost clients
  template <class Ready>
  void wait(Lock& lock, const std::string& what, const Ready& ready) {
    if (!changed_.wait_for(lock, 5 * timeout() / 2, [&] { return failure_ || ready(); })) fail(too_late(what));
    if (failure_) std::rethrow_exception(failure_);
  }
  void wait_until_merged(Lock& lock, int worker, SliceRange slices);
  void wait_for_keys(Lock& lock);
  void wait_for_workers(Lock& lock, std::int64_t pushes);
  void leave(int client);
  void lose(int client, const std::exception& error);
  PeerLost loss(const std::string& what) const;
  PeerLost too_late(const std::string& what) const;
  std::chrono::milliseconds timeout() const { return std::min(setting_.options.timeout, Deadline::kLongest); }

  // With the lock held. The first error is kept; every client hears of it.
  template <class Failure>
  void fail(const Failure& error) {
    if (failure_) return;
    failure_ = std::make_exception_ptr(error);
    changed_.notify_all();
    for (const Client& client : clients_) client.link.abandon(error.text().what);
  }

  DistSetting setting_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  ServerTable table_;
  StalenessGate gate_;
  StoreStatistics statistics_;
  std::map<std::int64_t, BatchTotals> totals_;                         // by number of the push
  std::int64_t last_push_ = std::numeric_limits<std::int64_t>::max();  // after which a worker stops, as it was asked to
  bool has_values_ = false;
  int finished_ = 0;  // workers that left in good order
  std::exception_ptr failure_;
  IntVector<Client> clients_;
};

}  // namespace lockstep
