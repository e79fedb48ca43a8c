// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/server.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/log.h"
#include "lockstep/base/process/stop.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/observe/rank_progress.h"
#include "lockstep/step/two_bit.h"
#include "lockstep/strategy/kvstore/staleness_gate.h"
#include "lockstep/strategy/option_names.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

std::string store_name(const KVStoreOptions& options) {
  const std::string kind = name_of(options.kind);
  return options.kind == KVStoreKind::kDistBounded ? concat(kind, " (", options.staleness, ")") : kind;
}

// The first server gates for all of them: workers ask the others after it (KVWorker::exchange).
int64_t bound_of(const DistSetting& setting) {
  const KVStoreOptions& options = setting.options.kvstore;
  return options.kind == KVStoreKind::kDistBounded && setting.number == 0 ? options.staleness
                                                                          : StalenessGate::kUnbounded;
}

class ThreadedServer final : public KVServer {
  using Lock = std::unique_lock<std::mutex>;

 public:
  explicit ThreadedServer(const DistSetting& setting)
      : setting_(setting),
        gate_(workers(), bound_of(setting), setting.servers.size() > 1),
        statistics_{.store = store_name(setting.options.kvstore), .workers = workers()} {
    for (const StoreLink& link : setting.to_clients) clients_.push_back({.link = link});
    observe::serves(clients_.size());
    const int threads = at::get_num_threads();
    for (int i = 0; i < clients_.size(); ++i)
      clients_[i].thread = std::thread([this, i, threads] {
        at::set_num_threads(threads);
        serve(i);
      });
  }

  ~ThreadedServer() override {
    if (std::uncaught_exceptions() > 0) {
      const Lock lock(mutex_);
      fail(PeerLost({.what = concat("server ", setting_.number, " has failed")}));
    }
    for (Client& client : clients_) client.thread.join();
  }

  BatchTotals wait_for_pushes(int64_t pushes) override {
    Lock lock(mutex_);
    wait_for_workers(lock, pushes);
    const BatchTotals totals = totals_[pushes];
    totals_.erase(totals_.begin(), totals_.upper_bound(pushes));
    if (last_push_ <= pushes) agree_to_stop();
    return totals;
  }

  // Has no deadline of its own: each client's thread has that of its link.
  void wait_for_goodbyes() override {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return failure_ || !any_worker_here(); });
    if (failure_) std::rethrow_exception(failure_);
  }

  std::vector<SliceState> states(int64_t pushes) override {
    Lock lock(mutex_);
    wait_for_keys(lock);
    wait_for_workers(lock, pushes);
    return table_.states();
  }

  void set_states(const std::vector<SliceState>& states) override {
    Lock lock(mutex_);
    wait_for_keys(lock);
    const bool of_optimizer = std::ranges::any_of(states, [](const SliceState& each) { return !each.state.empty(); });
    if (of_optimizer) wait(lock, "optimizer", [this] { return table_.has_optimizer(); });
    table_.set_states(states);
  }

  StoreStatistics statistics() const override {
    const Lock lock(mutex_);
    return statistics_;
  }

 private:
  struct Client {
    StoreLink link;
    std::thread thread{};
    Tensor outbox{};
    bool here = true;
    bool has_keys = false;
    int pending = 0;            // pushes of trained keys that are complete and not applied
    int64_t pushes = 0;         // those that are applied
    RequestHeader last_push{};  // the newest of trained keys
  };

  bool adapts() const { return setting_.options.kvstore.adapt_to_delay; }
  KVStoreKind kind() const { return setting_.options.kvstore.kind; }
  int workers() const { return to_int(setting_.workers.size()); }
  bool is_worker(int client) const { return client < workers(); }
  std::span<const Client> of_workers() const { return std::span(clients_).first(setting_.workers.size()); }

  // ---- Requests, each on its client's thread

  void serve(int client) {
    const torch::NoGradGuard no_grad;
    try {
      const StoreLink& link = clients_[client].link;
      for (RequestHeader request; (request = link.receive<RequestHeader>()).request != Request::kGoodbye;) {
        const observe::Serving serving;
        handle(client, request);
      }
      leave(client);
    } catch (const std::exception& error) {
      lose(client, error);
    }
  }

  void handle(int client, const RequestHeader& request) {
    const Received sender(name_of(client));
    const bool compressed = setting_.options.compression.kind == Compression::kTwoBit;
    const bool of_servers = request.request == Request::kState || request.request == Request::kAlive;
    const bool first = request.request == Request::kInit || of_servers;
    sender.require(is_worker(client) || of_servers, "a request that only workers make");
    sender.require(first || clients_[client].outbox.defined(), "a request before the keys");
    check(sender, request, table_.layout(), compressed);
    switch (request.request) {
      case Request::kInit: create(client, request); break;
      case Request::kOptimizer: set_optimizer(client); break;
      case Request::kPush:
      case Request::kPushPull: push(client, request); break;
      case Request::kPull: pull(client, request); break;
      case Request::kPullRows: pull_rows(client, request); break;
      case Request::kDelays: send_delays(client); break;
      case Request::kState: send_states(client, request); break;
      case Request::kAlive:
      case Request::kGoodbye: break;
    }
  }

  // ---- Keys and optimizer

  // Every worker sends the keys, which have to be those of the workers before it; the first one also sends values. Replies
  // wait for the last worker: who was first must hear of other keys, too.
  void create(int worker, const RequestHeader& request) {
    const StoreLink& link = clients_[worker].link;
    const Received sender(name_of(worker));
    std::vector<Key> keys(request.count);
    link.receive_all(std::span(keys));
    check(sender, keys);
    const BlockLayout layout = plan_keys(keys, setting_.servers.size(), request.bytes)[setting_.number];
    sender.bytes(layout.bytes(), 1, "a server's block");
    const Tensor inbox = link.allocate(layout.bytes());
    clients_[worker].outbox = link.allocate(layout.bytes());
    if (worker == 0) link.receive_bytes(inbox);
    Lock lock(mutex_);
    if (!table_.created()) table_.create(layout, workers());
    if (layout.slices() != table_.layout().slices()) {
      fail(MismatchError({.what = concat(name_of(worker), " has other keys than the workers before it"),
                          .next = "make the same model everywhere"}));
      std::rethrow_exception(failure_);
    }
    table_.set_inbox(worker, inbox);
    if (worker == 0) Tensor(table_.values()).copy_(inbox);
    has_values_ = has_values_ || worker == 0;
    clients_[worker].has_keys = true;
    changed_.notify_all();
    wait_for_keys(lock);
    wait(lock, "keys of every worker", [&] {
      return std::ranges::all_of(of_workers(), [](const Client& each) { return each.has_keys || !each.here; });
    });
    lock.unlock();
    link.send(ReplyHeader{});
  }

  void set_optimizer(int worker) {
    auto options = clients_[worker].link.receive<UpdateOptions>();
    check(Received(name_of(worker)), options);
    const bool own_state = kind() != KVStoreKind::kDistSync && workers() > 1 && adapts();
    if (auto* sgd = std::get_if<SGDOptions>(&options.optimizer); sgd && own_state) sgd->nesterov = sgd->momentum > 0;
    Lock lock(mutex_);
    if (!table_.has_optimizer()) table_.set_optimizer(options, own_state);
    changed_.notify_all();
    lock.unlock();
    clients_[worker].link.send(ReplyHeader{});
  }

  // ---- Pushes
  //
  // A worker's inbox belongs to its thread while values arrive, and to the table from add_push() until they are merged:
  // so each push first waits until the worker's last push of the same slices is merged.

  // kPushPull goes in parts of about 1/16 of the block (at least 256 KiB), so that receiving, merging and sending overlap:
  //
  //   1. post the receives of all parts
  //   2. part by part: wait until it is there, merge it if this worker is the last to have pushed it, then start sending
  //      the new values of all parts, in order, that are merged by now
  //   3. after the last part: wait until the rest is merged, send it, and wait for all sends
  //
  // It cannot deadlock. The client has posted all its receives before it sends, and sends all parts without waiting for a
  // reply: so 1 and 2 never wait for another worker, and every part is pushed whatever the others do. 3 waits for pushes
  // of other workers, which arrive for the same reason. The replies' memory, the outbox, is written again only by a later
  // request, after 3 has waited for all sends. kPush is one part, and is replied to without waiting for other workers.
  void push(int worker, const RequestHeader& request) {
    {
      Lock lock(mutex_);
      wait_until_merged(lock, worker, request.slices);
    }
    const bool pulls = request.request == Request::kPushPull;
    const StoreLink& link = clients_[worker].link;
    std::vector<uint8_t> has_value(request.slices.size());
    link.receive_all(std::span(has_value));
    const auto parts = pulls ? table_.layout().parts_of(request.slices) : std::vector{request.slices};
    Tensors values;
    std::vector<Pending> receives;
    for (const SliceRange part : parts) {
      values.push_back(place_for(worker, request, part));
      receives.push_back(link.start_receiving(values.back()));
    }
    std::vector<Pending> replies;
    for (size_t i = 0; i < parts.size(); ++i) {
      lockstep::wait(receives[i]);
      const auto flags = std::span(has_value).subspan(parts[i].first - request.slices.first, parts[i].size());
      add_push(worker, request, parts[i], values[i], flags);
      if (pulls) send_merged(worker, std::span(parts).first(i + 1), /*all=*/i + 1 == parts.size(), replies);
    }
    pulls ? finish(replies) : link.send(ReplyHeader{});
  }

  // Starts to send the parts behind those of `replies`, in order, that are merged. all: waits for those that are not.
  void send_merged(int worker, std::span<const SliceRange> parts, bool all, std::vector<Pending>& replies) {
    for (const SliceRange part : parts.subspan(replies.size())) {
      Lock lock(mutex_);
      if (!all && table_.has_unmerged(worker, part)) return;
      wait_until_merged(lock, worker, part);
      const Tensor values = read(worker, part);
      lock.unlock();
      replies.push_back(clients_[worker].link.start_sending(values));
    }
  }

  // Memory to receive pushed values in: the worker's inbox, or, compressed, memory of their own.
  Tensor place_for(int worker, const RequestHeader& request, SliceRange slices) const {
    if (request.threshold == 0) return table_.layout().region_of(slices, table_.inbox(worker));
    int64_t words = 0;
    for (const KeySlice& slice : table_.layout().slices_of(slices)) words += two_bit_words(slice.count);
    return torch::empty({words * 4}, torch::kUInt8);
  }

  void unpack(int worker, const RequestHeader& request, SliceRange slices, const Tensor& words) const {
    int64_t first = 0;
    for (const KeySlice& slice : table_.layout().slices_of(slices)) {
      const int64_t count = two_bit_words(slice.count);
      const Tensor into = slice.in_block(table_.inbox(worker));
      into.copy_(from_two_bits(words.narrow(0, first, count), slice.count, request.threshold, into.options()));
      first += count;
    }
  }

  // Values of `slices`, a part of the request's, have been received. The gradient is complete with the last part.
  void add_push(int worker, const RequestHeader& request, SliceRange slices, const Tensor& values,
                std::span<const uint8_t> has_value) {
    if (request.threshold > 0) unpack(worker, request, slices, values.view(torch::kInt32));
    Lock lock(mutex_);
    statistics_.pushed_bytes += to_int64(values.nbytes());
    table_.add_push(worker, slices, has_value, request.push.samples);
    if (request.trained && slices.last == request.slices.last) {
      clients_[worker].last_push = request;
      ++clients_[worker].pending;
    }
    kind() == KVStoreKind::kDistSync ? merge(request, slices) : apply(lock, worker, request);
    changed_.notify_all();
  }

  // dist_sync: merges those of the slices that every worker has pushed now. Once every worker's gradient is complete, all
  // their parts are merged: then it counts as one update of all their examples.
  void merge(const RequestHeader& request, SliceRange slices) {
    const ServerTable::Workers all(0, workers());
    IntVector<int64_t> delays;
    for (const int worker : all) delays.push_back(table_.delay(worker, slices));  // before the update: it adds one
    table_.merge(slices, all, {request.push.learning_rate});
    if (std::ranges::any_of(all, [this](int worker) { return clients_[worker].pending == 0; })) return;
    int64_t examples = 0;
    for (const int worker : all) {
      const RequestHeader& last = clients_[worker].last_push;
      statistics_.add_gradient(last.push.examples, last.devices, delays[worker]);
      examples += last.push.examples;
      count_push(worker);
    }
    statistics_.add_update(examples);
  }

  // dist_async and dist_bounded: this worker's push by itself. dist_bounded first lets gradients go that this update would
  // make too old. The delay is counted here, under the lock under which the update is made: updates since the worker read.
  //
  // Unless the plain rule was asked for, the learning rate is scaled by the gradient's share of the global batch, so that the
  // updates of a global batch move the weights as far as dist_sync's one. Each worker's gradients have a v of their own,
  // and Nesterov's g + momentum * v already counts what v adds next: docs/strategies/kvstore.md.
  void apply(Lock& lock, int worker, const RequestHeader& request) {
    if (request.trained && request.push.samples > 0) {
      wait(lock, "older gradients", [&] { return gate_.may_update(worker); });
      if (request.slices.size() > 0) {  // else other servers have these keys
        statistics_.add_gradient(request.push.examples, request.devices, table_.delay(worker, request.slices));
        statistics_.add_update(request.push.examples);
      }
      gate_.update(worker);
    } else if (request.trained) {
      gate_.drop(worker);
    }
    table_.merge(request.slices, ServerTable::Workers(worker, worker + 1),
                 {.learning_rate = request.push.learning_rate, .factor = adapts() ? share_of(worker) : 1});
    if (request.trained) count_push(worker);
  }

  // The part of a global batch that this worker's gradient is the mean of: its samples beside those that the others pushed
  // last. A worker that has not pushed yet, or is lost, counts as it would or did.
  double share_of(int worker) const {
    const int64_t own = clients_[worker].last_push.push.samples;
    int64_t all = 0;
    for (const Client& each : of_workers()) all += each.pushes + each.pending > 0 ? each.last_push.push.samples : own;
    return all > 0 ? fraction(own, all) : 1;
  }

  // The worker's newest push of trained keys is applied.
  void count_push(int worker) {
    Client& by = clients_[worker];
    --by.pending;
    const PushOptions& push = by.last_push.push;
    BatchTotals& totals = totals_[++by.pushes];
    totals.add(push.samples, push.loss);
    totals.examples += push.examples;
    if (by.last_push.stopping) last_push_ = std::min(last_push_, by.pushes);
  }

  // ---- Pulls

  // Copies the slices, with the lock held, into the client's outbox, which is sent without it.
  Tensor read(int worker, SliceRange slices) {
    const Tensor region = table_.layout().region_of(slices, clients_[worker].outbox);
    Tensor(region).copy_(table_.layout().region_of(slices, table_.values()));
    table_.mark_read(worker, slices);
    statistics_.pulled_bytes += to_int64(region.nbytes());
    return region;
  }

  void pull(int worker, const RequestHeader& request) {
    const bool gated = request.trained;
    Lock lock(mutex_);
    wait_until_merged(lock, worker, request.slices);
    if (gated) {
      gate_.ask_to_read(worker);
      changed_.notify_all();  // every server has applied its update now: others may be let through
      wait(lock, "its turn to read", [&] { return gate_.may_read(worker); });
    }
    const Tensor region = read(worker, request.slices);
    if (gated) gate_.read(worker);
    changed_.notify_all();
    lock.unlock();
    clients_[worker].link.send(ReplyHeader{});  // also without values: with dist_bounded it is this worker's turn
    clients_[worker].link.send_bytes(region);
  }

  void pull_rows(int worker, const RequestHeader& request) {
    const StoreLink& link = clients_[worker].link;
    const Tensor rows = torch::empty({request.count}, torch::kInt64);
    link.receive_bytes(rows.view(torch::kUInt8));
    const auto have = table_.layout().region_of(request.slices, table_.values()).numel() / request.bytes;
    if (rows.numel() > 0) {
      const Received sender(name_of(worker));
      sender.in(rows.min().item<int64_t>(), 0, have - 1, "the first of the rows");
      sender.in(rows.max().item<int64_t>(), 0, have - 1, "the last of the rows");
    }
    Lock lock(mutex_);
    wait_until_merged(lock, worker, request.slices);
    const Tensor region = table_.layout().region_of(request.slices, table_.values());
    const Tensor values = region.view({-1, request.bytes}).index_select(0, rows);
    lock.unlock();
    link.send_bytes(values.flatten());
  }

  void send_delays(int worker) {
    const DelayHistogram found = statistics().delays;
    clients_[worker].link.send(Delays{.gradients = found.gradients(), .max = found.max(), .mean = found.mean()});
  }

  void send_states(int client, const RequestHeader& request) {
    const StoreLink& link = clients_[client].link;
    TensorSender sender(link.world(), link.peer(), /*tag=*/0);
    for (const SliceState& slice : states(request.count)) {
      auto tensors = slice.state;
      tensors["value"] = slice.value;
      sender.send(message_of(tensors));
      sender.finish();
    }
  }

  // ---- Waits
  //
  // Deadlines, from the first to the last to expire, for a timeout T: a worker that has pushed nothing while others wait
  // for it, T; a silent client, T (dist_sync 2 T), on its link; wait(), for whatever else goes wrong, 2.5 T; a client that
  // waits for its server, 3 T. So the server finds out who is lost before anybody takes the server for lost.

  // Waits, in dist_sync, until this worker's pushes of the slices are merged. Merging needs all workers: who has pushed nothing
  // for so long is the one that is lost. Other kinds merge at once, and never wait here.
  void wait_until_merged(Lock& lock, int worker, SliceRange slices) {
    wait_at_most(
        lock, timeout(), [&] { return !table_.has_unmerged(worker, slices); },
        [&] { return concat(name_of(table_.first_missing(worker, slices)), " is lost: it has pushed nothing"); });
  }

  void wait_for_keys(Lock& lock) {
    wait(lock, "values of the keys", [this] { return has_values_; });
  }

  void wait_for_workers(Lock& lock, int64_t pushes) {
    wait(lock, concat("push ", pushes, " of every worker"), [&] {
      return std::ranges::all_of(of_workers(), [&](const Client& each) { return !each.here || each.pushes >= pushes; });
    });
  }

  // ---- Lost clients

  std::string name_of(int client) const {
    const std::string role = is_worker(client) ? concat("worker ", client) : "the first server";
    return concat(role, " (rank ", clients_[client].link.peer_in_job(), ")");
  }

  bool any_worker_here() const { return std::ranges::any_of(of_workers(), &Client::here); }

  void leave(int client) {
    const Lock lock(mutex_);
    finished_ += is_worker(client) ? 1 : 0;
    go_on_without(client);
  }

  void lose(int client, const std::exception& error) {
    const Lock lock(mutex_);
    const std::string what = concat(name_of(client), " is lost: ", what_of(error));
    if (is_worker(client) && kind() != KVStoreKind::kDistSync && !failure_) {
      go_on_without(client);
      clients_[client].link.abandon(what);
      log_warning(concat(what, "; ", any_worker_here() ? "the other workers go on" : "it was the last"));
      if (any_worker_here() || finished_ > 0) return;
    }
    clients_[client].here = false;
    fail(loss(what));
  }

  void go_on_without(int client) {
    clients_[client].here = false;
    if (is_worker(client)) gate_.leave(client);
    changed_.notify_all();
  }

  PeerLost loss(const std::string& what) const {
    return PeerLost({.what = what,
                     .here = concat("server ", setting_.number, " after ", statistics_.updates, " updates"),
                     .likely = "out of memory on that machine, or pre-emption; its own output says more",
                     .next = "run again with --resume, or choose dist_async, which goes on without a worker"});
  }

  void wait(Lock& lock, const std::string& what, const auto& ready) {
    wait_at_most(lock, 5 * timeout() / 2, ready, [&] { return concat("no ", what); });
  }
  void wait_at_most(Lock& lock, milliseconds longest, const auto& ready, const auto& trouble) {
    if (!changed_.wait_for(lock, longest, [&] { return failure_ || ready(); }))
      fail(loss(concat(trouble(), " within ", human_seconds(longest))));
    if (failure_) std::rethrow_exception(failure_);
  }
  milliseconds timeout() const { return std::min(setting_.options.timeout, Deadline::kLongest); }

  // Keeps the first error, of which every client hears. Call it with the lock held.
  template <class Failure>
  void fail(const Failure& error) {
    if (failure_) return;
    failure_ = std::make_exception_ptr(error);
    changed_.notify_all();
    for (const StoreLink& client : setting_.to_clients) client.abandon(error.text().what);
  }

  DistSetting setting_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  ServerTable table_;
  StalenessGate gate_;
  StoreStatistics statistics_;
  std::map<int64_t, BatchTotals> totals_;                    // by number of the push
  int64_t last_push_ = std::numeric_limits<int64_t>::max();  // after which a worker stops, as it was asked to
  bool has_values_ = false;
  int finished_ = 0;  // workers that left in good order
  std::exception_ptr failure_;
  IntVector<Client> clients_;
};

}  // namespace

std::unique_ptr<KVServer> make_kv_server(const DistSetting& setting) {
  return std::make_unique<ThreadedServer>(setting);
}

}  // namespace lockstep
