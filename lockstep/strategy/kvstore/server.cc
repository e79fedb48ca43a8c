#include "lockstep/strategy/kvstore/server.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::string store_name(Consistency consistency, std::int64_t staleness) {
  switch (consistency) {
    case Consistency::kSync: return "dist_sync";
    case Consistency::kAsync: return "dist_async";
    case Consistency::kBounded: return concat("dist_bounded (", staleness, ")");
  }
  return {};
}

// Every server but the first leaves it to that one to gate.
std::int64_t bound_of(const KVServerOptions& options) {
  return options.consistency == Consistency::kBounded && options.server == 0 ? options.staleness
                                                                             : StalenessGate::kUnbounded;
}

std::string first_line(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  return known != nullptr ? known->text().what : error.what();
}

}  // namespace

// ---- What the server's program calls

KVServer::KVServer(const KVServerOptions& options, std::vector<Link> clients)
    : options_(options),
      gate_(static_cast<int>(options.workers.size()), bound_of(options), options.servers > 1),
      statistics_{.store = store_name(options.consistency, options.staleness),
                  .workers = static_cast<int>(options.workers.size())} {
  for (Link& link : clients) clients_.push_back({.link = std::move(link)});
  const int threads = at::get_num_threads();
  for (std::size_t i = 0; i < clients_.size(); ++i)
    clients_[i].thread = std::thread([this, i, threads] {
      at::set_num_threads(threads);
      serve(static_cast<int>(i));
    });
}

KVServer::~KVServer() {
  if (std::uncaught_exceptions() > 0) {
    const Lock lock(mutex_);
    fail(std::make_exception_ptr(PeerLost({.what = concat("server ", options_.server, " has failed")})));
  }
  for (Client& each : clients_) each.thread.join();
}

BatchTotals KVServer::wait_for_pushes(std::int64_t pushes) {
  Lock lock(mutex_);
  wait_for_workers(lock, pushes);
  const auto [samples, loss] = std::exchange(totals_[pushes], {});
  totals_.erase(totals_.begin(), totals_.upper_bound(pushes));
  return {.samples = samples, .mean_loss = samples > 0 ? loss / static_cast<double>(samples) : 0};
}

ServerStatistics KVServer::statistics() const {
  const Lock lock(mutex_);
  return statistics_;
}

BlockLayout KVServer::layout() {
  Lock lock(mutex_);
  wait_for_keys(lock);
  return table_.layout();
}

std::vector<SliceState> KVServer::states(std::int64_t pushes) {
  Lock lock(mutex_);
  wait_for_keys(lock);
  wait_for_workers(lock, pushes);
  std::vector<SliceState> states;
  for (std::size_t i = 0; i < table_.layout().slices().size(); ++i) {
    states.push_back({.value = table_.value_of(i).clone(), .state = table_.state_of(i)});
    for (auto& [name, tensor] : states.back().state) tensor = tensor.clone();
  }
  return states;
}

void KVServer::set_states(const std::vector<SliceState>& states) {
  Lock lock(mutex_);
  wait_for_keys(lock);
  const bool of_optimizer = std::ranges::any_of(states, [](const SliceState& each) { return !each.state.empty(); });
  if (of_optimizer) wait(lock, "optimizer", [this] { return table_.has_optimizer(); });
  for (std::size_t i = 0; i < states.size(); ++i) table_.set(i, states[i].value, states[i].state);
}

void KVServer::serve(int number) {
  const torch::NoGradGuard no_grad;
  try {
    while (answer(number, client(number).link.receive<QuestionHeader>())) {
    }
    leave(number);
  } catch (const std::exception& error) {
    lose(number, first_line(error));
  }
}

// ---- Waiting, and who is gone

// A client that is silent for too long is lost, which ends the wait for it: this deadline, between those of the
// links' two sides, is for what nobody foresaw.
void KVServer::wait(Lock& lock, const std::string& what, const std::function<bool()>& ready) {
  const auto over = [&] { return failure_ || ready(); };
  const bool in_time = changed_.wait_for(lock, 5 * options_.timeout / 2, over);
  if (!in_time)
    fail(std::make_exception_ptr(PeerLost(
        {.what = concat("no ", what, " within ", human_seconds(2.5e-3 * static_cast<double>(options_.timeout.count()))),
         .here = concat("server ", options_.server)})));
  if (failure_) std::rethrow_exception(failure_);
}

// The others are in step with this worker: who has pushed nothing for so long is the one that holds them up.
void KVServer::wait_until_merged(Lock& lock, int worker, SliceRange slices) {
  const auto over = [&] { return failure_ || !table_.holds_any(worker, slices); };
  if (!changed_.wait_for(lock, options_.timeout, over))
    fail(loss(concat(name_of(table_.first_without(worker, slices)), " is lost: it has pushed nothing for ",
                     human_seconds(1e-3 * static_cast<double>(options_.timeout.count())))));
  if (failure_) std::rethrow_exception(failure_);
}

void KVServer::wait_for_keys(Lock& lock) {
  wait(lock, "values of the keys", [this] { return has_values_; });
}

void KVServer::wait_for_workers(Lock& lock, std::int64_t pushes) {
  wait(lock, concat("push ", pushes, " of every worker"), [&] {
    for (std::size_t i = 0; i < options_.workers.size(); ++i)
      if (clients_[i].here && clients_[i].pushes < pushes) return false;
    return true;
  });
}

std::string KVServer::name_of(int number) const {
  if (!is_worker(number)) return concat("the first server (rank ", clients_.back().link.peer_in_job(), ")");
  return concat("worker ", number, " (rank ", options_.workers[static_cast<std::size_t>(number)], ")");
}

bool KVServer::any_worker_here() const {
  return std::any_of(clients_.begin(), clients_.begin() + static_cast<std::ptrdiff_t>(options_.workers.size()),
                     [](const Client& each) { return each.here; });
}

void KVServer::leave(int number) {
  const Lock lock(mutex_);
  client(number).here = false;
  if (is_worker(number)) {
    gate_.leave(number);
    ++finished_;
  }
  changed_.notify_all();
}

void KVServer::lose(int number, const std::string& why) {
  const Lock lock(mutex_);
  client(number).here = false;
  if (failure_) return;
  const std::string what = concat(name_of(number), " is lost: ", why);
  if (is_worker(number) && options_.consistency != Consistency::kSync) {
    gate_.leave(number);
    changed_.notify_all();
    client(number).link.abandon(what);
    log_warning(concat(what, "; ", any_worker_here() ? "the other workers go on" : "it was the last"));
    if (any_worker_here() || finished_ > 0) return;
  }
  fail(loss(what));
}

std::exception_ptr KVServer::loss(const std::string& what) const {
  return std::make_exception_ptr(
      PeerLost({.what = what,
                .here = concat("server ", options_.server, " after ", statistics_.updates, " updates"),
                .likely = "out of memory on that machine, or pre-emption; its own output says more",
                .next = "run again with --resume, or choose dist_async, which goes on without a worker"}));
}

// With the lock held, or before there are threads to hold it. The first error stays; every client hears of it.
void KVServer::fail(std::exception_ptr error) {
  if (failure_) return;
  failure_ = std::move(error);
  changed_.notify_all();
  std::string reason;
  try {
    std::rethrow_exception(failure_);
  } catch (const std::exception& known) {
    reason = first_line(known);
  }
  for (const Client& each : clients_) each.link.abandon(reason);
}

}  // namespace lockstep
