// SPDX-License-Identifier: Apache-2.0
// How a server (server.h) handles requests, each on its client's thread.
#include "lockstep/strategy/kvstore/server.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "lockstep/base/text.h"
#include "lockstep/gradient/two_bit.h"
#include "lockstep/observe/rank_progress.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

constexpr std::int64_t kMostSlices = std::int64_t{1} << 24;
constexpr std::int64_t kMostSamples = std::int64_t{1} << 40;  // of one push: sums of them stay exact

void check_options(const Received& sender, const UpdateOptions& options) {
  sender.in(static_cast<std::int64_t>(options.optimizer.index()), 0,
            static_cast<std::int64_t>(std::variant_size_v<OptimizerOptions>) - 1, "the optimizer");
  if (const auto* sgd = std::get_if<SGDOptions>(&options.optimizer))
    sender.in(*reinterpret_cast<const std::uint8_t*>(&sgd->nesterov), 0, 1, "nesterov");
  for (const auto& [name, value] : values_of(options.optimizer))
    sender.require(std::isfinite(value), concat(name, " is ", value));
  for (const double number : {options.clipping.max_norm, options.clipping.max_value, options.ema_decay})
    sender.require(number >= 0 && std::isfinite(number), concat("clipping or average of ", number));
}

}  // namespace

void StoreServer::serve(int client) {
  const torch::NoGradGuard no_grad;
  try {
    const Link& link = clients_[client].link;
    for (RequestHeader request; (request = link.receive<RequestHeader>()).request != Request::kGoodbye;) {
      const observe::Serving serving;
      handle(client, request);
    }
    leave(client);
  } catch (const std::exception& error) {
    lose(client, error);
  }
}

// A request comes from another process: what it says is checked before it is used. What depends on its payload is checked
// where that is received.
void StoreServer::check(int client, const RequestHeader& request) const {
  const Received sender(name_of(client));
  sender.in(static_cast<std::int64_t>(request.request), 0, static_cast<std::int64_t>(Request::kGoodbye), "a request");
  if (request.request == Request::kAlive || request.request == Request::kState) return;
  sender.require(is_worker(client), "a request that only workers make");
  if (request.request == Request::kInit) {
    sender.in(request.count, 0, kMostSlices, "the number of slices");
    return;
  }
  sender.require(clients_[client].outbox.defined(), "a request before the keys");
  const auto all = std::ssize(table_.layout().slices());
  const auto last = sender.in(static_cast<std::int64_t>(request.slices.last), 0, all, "the last slice");
  sender.in(static_cast<std::int64_t>(request.slices.first), 0, last, "the first slice");
  for (const bool* flag : {&request.trained, &request.stopping})
    sender.in(*reinterpret_cast<const std::uint8_t*>(flag), 0, 1, "a flag");
  sender.in(request.push.samples, 0, kMostSamples, "the number of samples");
  sender.in(request.devices, 0, kMostSamples, "the number of devices");
  sender.require(!std::isinf(request.push.learning_rate), "a learning rate that is infinite");
  const bool compressed = setting_.options.compression.kind == Compression::kTwoBit;
  sender.require(request.threshold == 0 || (compressed && request.threshold > 0 && std::isfinite(request.threshold)),
                 concat("a threshold of ", request.threshold));
  if (request.request == Request::kPullRows) check_rows(sender, request);
}

// A key's slices follow each other without gaps, so the server's rows of it are one table.
void StoreServer::check_rows(const Received& sender, const RequestHeader& request) const {
  const auto slices = table_.layout().slices_of(request.slices);
  sender.require(!slices.empty() && slices.front().key == slices.back().key, "rows of no key, or of several");
  const std::int64_t bytes = slices.back().offset + slices.back().bytes() - slices.front().offset;
  sender.in(request.bytes, 1, std::max<std::int64_t>(bytes, 1), "the bytes of a row");
  sender.require(bytes % request.bytes == 0, concat("rows of ", request.bytes, " bytes in ", bytes));
  sender.bytes(request.count, std::max<std::int64_t>(request.bytes, sizeof(std::int64_t)), "rows");
}

void StoreServer::handle(int client, const RequestHeader& request) {
  check(client, request);
  switch (request.request) {
    case Request::kInit: create(client, request); break;
    case Request::kOptimizer: set_optimizer(client); break;
    case Request::kPush:
    case Request::kPushPull: push(client, request); break;
    case Request::kPull: pull(client, request); break;
    case Request::kPullRows: pull_rows(client, request); break;
    case Request::kState: send_states(client, request); break;
    case Request::kAlive:
    case Request::kGoodbye: break;
  }
}

// ---- Keys and optimizer

// Every worker sends its layout, which has to be that of the workers before it; the first one also sends values.
void StoreServer::create(int worker, const RequestHeader& request) {
  const Link& link = clients_[worker].link;
  std::vector<KeySlice> slices(request.count);
  link.receive_all(std::span(slices));
  const BlockLayout layout(std::move(slices));
  layout.require_possible(Received(name_of(worker)));
  const torch::Tensor inbox = link.allocate(layout.bytes());
  clients_[worker].outbox = link.allocate(layout.bytes());
  if (worker == 0) link.receive_bytes(inbox);
  Lock lock(mutex_);
  if (!table_.created()) table_.create(layout, workers());
  if (layout.slices() != table_.layout().slices()) {
    fail(MismatchError({.what = concat(name_of(worker), " has other keys than the workers before it"),
                        .likely = "a model that differs between the workers",
                        .next = "make the same model everywhere"}));
    std::rethrow_exception(failure_);
  }
  table_.set_inbox(worker, inbox);
  if (worker == 0) torch::Tensor(table_.values()).copy_(inbox);
  has_values_ = has_values_ || worker == 0;
  changed_.notify_all();
  wait_for_keys(lock);
  lock.unlock();
  link.send(ReplyHeader{});
}

void StoreServer::set_optimizer(int worker) {
  auto options = clients_[worker].link.receive<UpdateOptions>();
  check_options(Received(name_of(worker)), options);
  const bool own_state = kind() != KVStoreKind::kDistSync && workers() > 1;
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
void StoreServer::push(int worker, const RequestHeader& request) {
  {
    Lock lock(mutex_);
    wait_until_merged(lock, worker, request.slices);
  }
  const bool pulls = request.request == Request::kPushPull;
  const Link& link = clients_[worker].link;
  std::vector<std::uint8_t> has_value(request.slices.size());
  link.receive_all(std::span(has_value));
  const auto parts = pulls ? table_.layout().parts_of(request.slices) : std::vector{request.slices};
  std::vector<torch::Tensor> values;
  std::vector<Pending> receives;
  for (const SliceRange part : parts) {
    values.push_back(place_for(worker, request, part));
    receives.push_back(link.start_receiving(values.back()));
  }
  std::vector<Pending> replies;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    receives[i].wait();
    const auto flags = std::span(has_value).subspan(parts[i].first - request.slices.first, parts[i].size());
    add_push(worker, request, parts[i], values[i], flags);
    if (pulls) send_merged(worker, std::span(parts).first(i + 1), /*all=*/i + 1 == parts.size(), replies);
  }
  pulls ? finish(replies) : link.send(ReplyHeader{});
}

// Starts to send the parts behind those of `replies`, in order, that are merged. all: waits for those that are not.
void StoreServer::send_merged(int worker, std::span<const SliceRange> parts, bool all, std::vector<Pending>& replies) {
  for (const SliceRange part : parts.subspan(replies.size())) {
    Lock lock(mutex_);
    if (!all && table_.has_unmerged(worker, part)) return;
    wait_until_merged(lock, worker, part);
    const torch::Tensor values = read(worker, part);
    lock.unlock();
    replies.push_back(clients_[worker].link.start_sending(values));
  }
}

// Where pushed values are received: in the worker's inbox, or compressed in memory of their own.
torch::Tensor StoreServer::place_for(int worker, const RequestHeader& request, SliceRange slices) const {
  if (request.threshold == 0) return table_.layout().region_of(slices, table_.inbox(worker));
  std::int64_t words = 0;
  for (const KeySlice& slice : table_.layout().slices_of(slices)) words += two_bit_words(slice.count);
  return torch::empty({words * 4}, torch::kUInt8);
}

void StoreServer::unpack(int worker, const RequestHeader& request, SliceRange slices,
                         const torch::Tensor& words) const {
  std::int64_t first = 0;
  for (const KeySlice& slice : table_.layout().slices_of(slices)) {
    const std::int64_t count = two_bit_words(slice.count);
    const torch::Tensor into = slice.in_block(table_.inbox(worker));
    into.copy_(from_two_bits(words.narrow(0, first, count), slice.count, request.threshold, into.options()));
    first += count;
  }
}

// Values of `slices`, a part of the request's, have been received. The gradient is complete with the last part.
void StoreServer::add_push(int worker, const RequestHeader& request, SliceRange slices, const torch::Tensor& values,
                           std::span<const std::uint8_t> has_value) {
  if (request.threshold > 0) unpack(worker, request, slices, values.view(torch::kInt32));
  Lock lock(mutex_);
  statistics_.pushed_bytes += static_cast<std::int64_t>(values.nbytes());
  table_.add_push(worker, slices, has_value, request.push.samples);
  if (request.trained && slices.last == request.slices.last) {
    clients_[worker].last_push = request;
    ++clients_[worker].pending;
  }
  kind() == KVStoreKind::kDistSync ? merge(request, slices) : apply(lock, worker, request);
  changed_.notify_all();
}

// dist_sync: merges those of the slices that every worker has pushed now. Once every worker's gradient is complete, all
// their parts are merged: then it counts as one update of all their samples.
void StoreServer::merge(const RequestHeader& request, SliceRange slices) {
  const ServerTable::Workers all(0, workers());
  IntVector<std::int64_t> delays;
  for (const int worker : all) delays.push_back(table_.delay(worker, slices));  // before the update: it adds one
  table_.merge(slices, all, {request.push.learning_rate});
  if (std::ranges::any_of(all, [this](int worker) { return clients_[worker].pending == 0; })) return;
  std::int64_t samples = 0;
  for (const int worker : all) {
    const RequestHeader& last = clients_[worker].last_push;
    statistics_.add_gradient(last.push.samples, last.devices, delays[worker]);
    samples += last.push.samples;
    count_push(worker);
  }
  statistics_.add_update(samples);
}

// dist_async and dist_bounded: this worker's push by itself. dist_bounded first lets gradients go that this update would
// make too old. The delay is counted here, under the lock under which the update is made: updates since the worker read.
//
// The learning rate is scaled by the gradient's share of the global batch, so that the updates of a global batch move the
// weights as far as dist_sync's one. Momentum follows DANA-Slim (Hakimi et al., "Taming momentum in a distributed
// asynchronous environment", 2019): each worker's gradients have a v of their own, and Nesterov's g + momentum * v
// already counts what v adds next. One v for all would add to the momentum that delays act as (Mitliagkas et al., 2016).
void StoreServer::apply(Lock& lock, int worker, const RequestHeader& request) {
  if (request.trained && request.push.samples > 0) {
    wait(lock, "older gradients", [&] { return gate_.may_update(worker); });
    statistics_.add_gradient(request.push.samples, request.devices, table_.delay(worker, request.slices));
    statistics_.add_update(request.push.samples);
    gate_.update(worker);
  }
  table_.merge(request.slices, ServerTable::Workers(worker, worker + 1),
               {.learning_rate = request.push.learning_rate, .factor = share_of(worker)});
  if (request.trained) count_push(worker);
}

// The part of a global batch that this worker's gradient is the mean of: its samples beside those that the others pushed
// last. A worker that has not pushed yet, or is lost, counts as it would or did.
double StoreServer::share_of(int worker) const {
  const std::int64_t own = clients_[worker].last_push.push.samples;
  std::int64_t all = 0;
  for (int other = 0; other < workers(); ++other) {
    const Client& client = clients_[other];
    all += client.pushes + client.pending > 0 ? client.last_push.push.samples : own;
  }
  return all > 0 ? static_cast<double>(own) / static_cast<double>(all) : 1;
}

// The worker's newest push of trained keys is applied.
void StoreServer::count_push(int worker) {
  Client& by = clients_[worker];
  --by.pending;
  totals_[++by.pushes].add(by.last_push.push.samples, by.last_push.push.loss);
  if (by.last_push.stopping) last_push_ = std::min(last_push_, by.pushes);
}

// ---- Pulls

// With the lock held: copies the slices into the client's outbox, which is sent without the lock.
torch::Tensor StoreServer::read(int worker, SliceRange slices) {
  const torch::Tensor region = table_.layout().region_of(slices, clients_[worker].outbox);
  torch::Tensor(region).copy_(table_.layout().region_of(slices, table_.values()));
  table_.mark_read(worker, slices);
  statistics_.pulled_bytes += static_cast<std::int64_t>(region.nbytes());
  return region;
}

void StoreServer::pull(int worker, const RequestHeader& request) {
  const bool gated = request.trained;
  Lock lock(mutex_);
  wait_until_merged(lock, worker, request.slices);
  if (gated) {
    gate_.ask_to_read(worker);
    changed_.notify_all();  // every server has applied its update now: others may be let through
    wait(lock, "its turn to read", [&] { return gate_.may_read(worker); });
  }
  const torch::Tensor region = read(worker, request.slices);
  if (gated) gate_.read(worker);
  changed_.notify_all();
  lock.unlock();
  clients_[worker].link.send(ReplyHeader{});
  clients_[worker].link.send_bytes(region);
}

void StoreServer::pull_rows(int worker, const RequestHeader& request) {
  const Link& link = clients_[worker].link;
  const torch::Tensor rows = torch::empty({request.count}, torch::kInt64);
  link.receive_bytes(rows.view(torch::kUInt8));
  const auto have = table_.layout().region_of(request.slices, table_.values()).numel() / request.bytes;
  if (rows.numel() > 0) {
    const Received sender(name_of(worker));
    sender.in(rows.min().item<std::int64_t>(), 0, have - 1, "the first of the rows");
    sender.in(rows.max().item<std::int64_t>(), 0, have - 1, "the last of the rows");
  }
  Lock lock(mutex_);
  wait_until_merged(lock, worker, request.slices);
  const torch::Tensor region = table_.layout().region_of(request.slices, table_.values());
  const torch::Tensor values = region.view({-1, request.bytes}).index_select(0, rows);
  lock.unlock();
  link.send(ReplyHeader{});
  link.send_bytes(values.flatten());
}

void StoreServer::send_states(int client, const RequestHeader& request) {
  const auto all = states(request.count);
  const Link& link = clients_[client].link;
  link.send(ReplyHeader{.count = std::ssize(all)});
  TensorSender sender(link.world(), link.peer(), /*tag=*/0);
  for (const SliceState& slice : all) {
    link.send(slice.place);
    sender.send({slice.value});
    sender.send(message_of(slice.state));
    sender.finish();
  }
}

}  // namespace lockstep
