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
// Flow:    messages.h -> here -> server_table.h -> step/update/
// Owns:    the table, its threads, its ends of the links
// Threads: all functions from any
// Ranks:   a server
//
// Losses: links have connections of their own, so each client's loss is noticed by its thread alone: within 100 ms
// if it was killed, after its link's timeout if it is silent. docs/strategies/kvstore.md says what follows.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/batch_totals.h"
#include "lockstep/strategy/kvstore/messages.h"
#include "lockstep/strategy/kvstore/server_table.h"
#include "lockstep/strategy/kvstore/statistics.h"

namespace lockstep {

class KVServer {
 public:
  // Blocks until every client has left or is lost. While an exception is in flight the clients are told at once.
  virtual ~KVServer() = default;

  // Blocks until every worker that is still there has pushed gradients `pushes` times and they are applied. Returns the
  // samples and mean loss of each worker's push of that number. Throws PeerLost.
  virtual BatchTotals wait_for_pushes(int64_t pushes) = 0;

  // Blocks until every worker has left or is lost. Throws PeerLost.
  virtual void wait_for_goodbyes() = 0;

  virtual StoreStatistics statistics() const = 0;

  // Copies of all slices' states, after `pushes` pushes of every worker that is still there. Block until the store has its keys.
  // Throw PeerLost.
  virtual std::vector<SliceState> states(int64_t pushes = 0) = 0;
  virtual void set_states(const std::vector<SliceState>& states) = 0;
};

// Begins to serve.
std::unique_ptr<KVServer> make_kv_server(const DistSetting& setting);

// server_strategy.cc: the strategy of a server.
std::unique_ptr<Strategy> make_server_strategy(const DistSetting& setting, const Task& task);

}  // namespace lockstep
