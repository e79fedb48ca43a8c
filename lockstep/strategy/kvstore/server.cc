// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/server.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "lockstep/base/log.h"
#include "lockstep/base/stop.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/observe/rank_progress.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep {
namespace {

std::string store_name(const KVStoreOptions& options) {
  const std::string kind = name_of(options.kind);
  return options.kind == KVStoreKind::kDistBounded ? concat(kind, " (", options.staleness, ")") : kind;
}

// The first server gates for all of them: workers ask the others after it (StoreClient::exchange).
std::int64_t bound_of(const DistSetting& setting) {
  const KVStoreOptions& options = setting.options.kvstore;
  return options.kind == KVStoreKind::kDistBounded && setting.number == 0 ? options.staleness
                                                                          : StalenessGate::kUnbounded;
}

std::string first_line(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  return known != nullptr ? known->text().what : error.what();
}

std::string seconds_text(std::chrono::duration<double> time) { return human_seconds(time.count()); }

}  // namespace

// ---- What the server's process calls

StoreServer::StoreServer(const DistSetting& setting)
    : setting_(setting),
      gate_(workers(), bound_of(setting), setting.servers.size() > 1),
      statistics_{.store = store_name(setting.options.kvstore), .workers = workers()} {
  for (const Link& link : setting.to_clients) clients_.push_back({.link = link});
  observe::serves(clients_.size());
  const int threads = at::get_num_threads();
  for (int i = 0; i < clients_.size(); ++i)
    clients_[i].thread = std::thread([this, i, threads] {
      at::set_num_threads(threads);
      serve(i);
    });
}

StoreServer::~StoreServer() {
  if (std::uncaught_exceptions() > 0) {
    const Lock lock(mutex_);
    fail(PeerLost({.what = concat("server ", setting_.number, " has failed")}));
  }
  for (Client& client : clients_) client.thread.join();
}

BatchTotals StoreServer::wait_for_pushes(std::int64_t pushes) {
  Lock lock(mutex_);
  wait_for_workers(lock, pushes);
  const BatchTotals totals = totals_[pushes];
  totals_.erase(totals_.begin(), totals_.upper_bound(pushes));
  if (last_push_ <= pushes) agree_to_stop();
  return totals;
}

// Without a deadline of its own: each client's thread has that of its link.
void StoreServer::wait_for_goodbyes() {
  Lock lock(mutex_);
  changed_.wait(lock, [this] { return failure_ || !any_worker_here(); });
  if (failure_) std::rethrow_exception(failure_);
}

BlockLayout StoreServer::layout() {
  Lock lock(mutex_);
  wait_for_keys(lock);
  return table_.layout();
}

std::vector<SliceState> StoreServer::states(std::int64_t pushes) {
  Lock lock(mutex_);
  wait_for_keys(lock);
  wait_for_workers(lock, pushes);
  return table_.states();
}

void StoreServer::set_states(const std::vector<SliceState>& states) {
  Lock lock(mutex_);
  wait_for_keys(lock);
  const bool of_optimizer = std::ranges::any_of(states, [](const SliceState& each) { return !each.state.empty(); });
  if (of_optimizer) wait(lock, "optimizer", [this] { return table_.has_optimizer(); });
  table_.set_states(states);
}

// ---- Waits
//
// Deadlines, from the first to the last to expire, for a timeout T: a worker that has pushed nothing while others wait
// for it, T; a silent client, T (dist_sync 2 T), on its link; wait(), for whatever else goes wrong, 2.5 T; a client that
// waits for its server, 3 T. So the server finds out who is lost before anybody takes the server for lost.

// In dist_sync: until this worker's pushes of the slices are merged. Merging needs all workers: who has pushed nothing
// for so long is the one that is lost. Other kinds merge at once, and never wait here.
void StoreServer::wait_until_merged(Lock& lock, int worker, SliceRange slices) {
  const auto over = [&] { return failure_ || !table_.has_unmerged(worker, slices); };
  if (!changed_.wait_for(lock, timeout(), over))
    fail(loss(concat(name_of(table_.first_missing(worker, slices)), " is lost: it has pushed nothing for ",
                     seconds_text(timeout()))));
  if (failure_) std::rethrow_exception(failure_);
}

void StoreServer::wait_for_keys(Lock& lock) {
  wait(lock, "values of the keys", [this] { return has_values_; });
}

void StoreServer::wait_for_workers(Lock& lock, std::int64_t pushes) {
  wait(lock, concat("push ", pushes, " of every worker"), [&] {
    for (int worker = 0; worker < workers(); ++worker)
      if (clients_[worker].here && clients_[worker].pushes < pushes) return false;
    return true;
  });
}

// ---- Lost clients

std::string StoreServer::name_of(int client) const {
  const std::string role = is_worker(client) ? concat("worker ", client) : "the first server";
  return concat(role, " (rank ", clients_[client].link.peer_in_job(), ")");
}

bool StoreServer::any_worker_here() const {
  return std::any_of(clients_.begin(), clients_.begin() + workers(), [](const Client& each) { return each.here; });
}

void StoreServer::leave(int client) {
  const Lock lock(mutex_);
  clients_[client].here = false;
  if (is_worker(client)) {
    gate_.leave(client);
    ++finished_;
  }
  changed_.notify_all();
}

void StoreServer::lose(int client, const std::exception& error) {
  const Lock lock(mutex_);
  clients_[client].here = false;
  if (failure_) return;
  const std::string what = concat(name_of(client), " is lost: ", first_line(error));
  if (is_worker(client) && kind() != KVStoreKind::kDistSync) {
    gate_.leave(client);
    changed_.notify_all();
    clients_[client].link.abandon(what);
    log_warning(concat(what, "; ", any_worker_here() ? "the other workers go on" : "it was the last"));
    if (any_worker_here() || finished_ > 0) return;
  }
  fail(loss(what));
}

PeerLost StoreServer::loss(const std::string& what) const {
  return PeerLost({.what = what,
                   .here = concat("server ", setting_.number, " after ", statistics_.updates, " updates"),
                   .likely = "out of memory on that machine, or pre-emption; its own output says more",
                   .next = "run again with --resume, or choose dist_async, which goes on without a worker"});
}

PeerLost StoreServer::too_late(const std::string& what) const {
  return PeerLost({.what = concat("no ", what, " within ", seconds_text(2.5 * timeout())),
                   .here = concat("server ", setting_.number)});
}

}  // namespace lockstep
