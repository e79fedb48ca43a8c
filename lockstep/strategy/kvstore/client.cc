// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/client.h"

#include <algorithm>
#include <exception>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/gradient/two_bit.h"

namespace lockstep {

StoreClient::StoreClient(const StoreClientOptions& options, std::vector<Link> servers, Devices* devices)
    : options_(options), sum_(SumOn::kCpu, devices) {
  for (Link& link : servers) servers_.push_back({.link = std::move(link)});
}

StoreClient::~StoreClient() {
  if (std::uncaught_exceptions() > 0) return;
  for (const Server& server : servers_) try {
      server.link.send(RequestHeader{.request = Request::kGoodbye});
    } catch (const std::exception&) {  // it is gone already
    }
}

// ---- Requests

// Asks all servers, then hears all of them. dist_bounded: the first server decides whose turn it is, so the others are
// asked after it has replied.
template <class Ask, class Hear>
void StoreClient::exchange(const Ask& ask, const Hear& hear) {
  const auto finish = [&](Server& server) {
    for (Work& work : server.sends) work.wait();
    server.sends.clear();
    hear(server);
  };
  const auto each = [&](std::span<Server> some, const auto& call) {
    for (Server& server : some) try {
        call(server);
      } catch (const PeerLost& error) {
        give_up(server, error);
      }
  };
  const std::span<Server> all(servers_);
  const std::size_t first = options_.kind == KVStoreKind::kDistBounded ? 1 : all.size();
  for (const auto& some : {all.first(first), all.subspan(first)}) {
    each(some, ask);
    each(some, finish);
  }
}

// Tells the other servers, so that they do not report this worker as the one that is lost.
void StoreClient::give_up(const Server& lost, const PeerLost& error) {
  const std::string what = concat("a server of the store is lost, or has given up: server ", &lost - servers_.data(),
                                  " (rank ", lost.link.peer_in_job(), "): ", error.text().what);
  abandon(what);
  throw PeerLost({.what = what,
                  .here = concat("worker ", options_.worker),
                  .likely = "that server or, with dist_sync, another worker died or stopped",
                  .next = "run again with --resume to go on from the last checkpoint"});
}

void StoreClient::abandon(const std::string& reason) const {
  for (const Server& server : servers_) server.link.abandon(reason);
}

void StoreClient::create(const std::vector<torch::Tensor>& values) {
  const Push all{.keys = {0, keys().size()}, .values = values, .header = {}};
  auto layouts = plan_keys(keys(), {.servers = static_cast<int>(servers_.size()), .split_above = options_.split_above});
  for (std::size_t i = 0; i < servers_.size(); ++i) {
    servers_[i].layout = std::move(layouts[i]);
    servers_[i].outbox = servers_[i].link.allocate(servers_[i].layout.bytes());
    servers_[i].inbox = servers_[i].link.allocate(servers_[i].layout.bytes());
    servers_[i].residuals.resize(servers_[i].layout.slices().size());
  }
  exchange(
      [&](Server& server) {
        const auto& slices = server.layout.slices();
        server.link.send(RequestHeader{.request = Request::kInit, .count = std::ssize(slices)});
        server.link.send_all(std::span(slices));
        if (options_.worker > 0) return;
        pack(server, server.layout.range_of(all.keys), all);
        send_payload(server, server.outbox);
      },
      [](Server& server) { server.link.receive<ReplyHeader>(); });
}

void StoreClient::set_optimizer(const UpdateOptions& options) {
  require_possible(options);
  in_parts_ = options.clipping.max_norm == 0;  // that norm is of all gradients
  exchange(
      [&](Server& server) {
        server.link.send(RequestHeader{.request = Request::kOptimizer});
        server.link.send(options);
      },
      [](Server& server) { server.link.receive<ReplyHeader>(); });
}

// A server knows only its own slices.
void StoreClient::require_possible(const UpdateOptions& options) const {
  if (options.clipping.max_norm > 0 && servers_.size() > 1)
    throw UsageError({.what = "clipping by norm on several servers: none of them knows the norm of all gradients",
                      .next = "use one server"});
  if (!layerwise(options.optimizer)) return;
  for (const Server& server : servers_)
    for (const KeySlice& slice : server.layout.slices())
      if (slice.trained != 0 && slice.count < keys()[slice.key].elements)
        throw UsageError({.what = concat(name_of(options.optimizer), " takes norms over whole keys, but ",
                                         keys()[slice.key].name, " is split"),
                          .next = "make the store with a larger split_above"});
}

// ---- Pushes

bool StoreClient::any_trained(KeyRange range) const {
  return std::ranges::any_of(std::span(keys()).subspan(range.first, range.size()), &Key::trained);
}

StoreClient::Push StoreClient::make_push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) {
  const bool trained = any_trained(keys);
  return {.keys = keys,
          .values = sum_.sum(values, keys.first),
          .header = {.trained = trained ? 1 : 0,
                     .samples = options.samples,
                     .devices = std::ssize(values),
                     .loss = options.loss,
                     .learning_rate = options.learning_rate,
                     .threshold = trained ? options_.threshold : 0}};
}

// The header, and which of the slices have a value.
void StoreClient::send_header(const Server& server, const Push& push, Request request) {
  RequestHeader header = push.header;
  header.request = request;
  header.slices = server.layout.range_of(push.keys);
  server.link.send(header);
  std::vector<std::uint8_t> has_value;
  for (const KeySlice& slice : server.layout.slices_of(header.slices)) has_value.push_back(push.of(slice).defined());
  server.link.send_all(std::span<const std::uint8_t>(has_value));
}

void StoreClient::start_sending(Server& server, const torch::Tensor& bytes) {
  if (bytes.numel() > 0) server.sends.push_back(server.link.start_sending(bytes));
}

// To several servers at the same time.
void StoreClient::send_payload(Server& server, const torch::Tensor& bytes) {
  servers_.size() == 1 ? server.link.send_bytes(bytes) : start_sending(server, bytes);
}

void StoreClient::push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) {
  const torch::NoGradGuard no_grad;
  const Push push = make_push(keys, values, options);
  exchange(
      [&](Server& server) {
        send_header(server, push, Request::kPush);
        const torch::Tensor payload = payload_of(server, server.layout.range_of(keys), push);
        send_payload(server, payload);
        bytes_pushed_ += payload.numel();
      },
      [](Server& server) { server.link.receive<ReplyHeader>(); });
}

// Waiting for the sends first is safe: the server receives all parts whatever other workers do (server_requests.cc).
void StoreClient::push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                            const PushOptions& options) {
  if (options_.kind != KVStoreKind::kDistSync || !in_parts_) return Store::push_pull(keys, values, into, options);
  const torch::NoGradGuard no_grad;
  const Push push = make_push(keys, values, options);
  exchange([&](Server& server) { start_push_pull(server, push); },
           [](Server& server) {
             for (Work& work : server.receives) work.wait();
             server.receives.clear();
           });
  unpack(keys, into);
}

// One server's slices of the keys in parts (BlockLayout::parts_of), K/S bytes each way:
//
//   1. post the receives of all parts     into the inbox
//   2. send the header and the flags
//   3. per part: pack or compress it into the outbox, start to send it
//
// Nothing here waits for the server to merge. A part's reply arrives once all workers have pushed it, while later parts
// are still being packed and sent; its receive is posted already, so the server never waits for this worker to receive.
void StoreClient::start_push_pull(Server& server, const Push& push) {
  const auto parts = server.layout.parts_of(server.layout.range_of(push.keys));
  for (const SliceRange part : parts)
    if (const torch::Tensor region = server.layout.region_of(part, server.inbox); region.numel() > 0) {
      server.receives.push_back(server.link.start_receiving(region));
      bytes_pulled_ += region.numel();
    }
  send_header(server, push, Request::kPushPull);
  for (const SliceRange part : parts) {
    const torch::Tensor payload = payload_of(server, part, push);
    start_sending(server, payload);
    bytes_pushed_ += payload.numel();
  }
}

torch::Tensor StoreClient::payload_of(Server& server, SliceRange slices, const Push& push) const {
  if (push.header.threshold > 0) return compress(server, slices, push);
  pack(server, slices, push);
  return server.layout.region_of(slices, server.outbox);
}

void StoreClient::pack(Server& server, SliceRange slices, const Push& push) {
  for (const KeySlice& slice : server.layout.slices_of(slices))
    if (const torch::Tensor& value = push.of(slice); value.defined())
      slice.in_block(server.outbox).copy_(slice.in_value(value));
}

// The 2-bit codes of all slices, one after the other, as bytes. What they leave out stays in the residuals, and is added
// to the next push. A gradient of no samples, which the server ignores, leaves the residuals as they are.
torch::Tensor StoreClient::compress(Server& server, SliceRange range, const Push& push) const {
  std::vector<torch::Tensor> words{torch::empty({0}, torch::kInt32)};
  for (std::size_t i = range.first; i < range.last; ++i) {
    const KeySlice& slice = server.layout.slices()[i];
    torch::Tensor& residual = server.residuals[i];
    if (!residual.defined()) residual = torch::zeros({slice.count}, slice.scalar_type());
    const torch::Tensor& value = push.of(slice);
    const bool counts = value.defined() && push.header.samples > 0;
    if (counts) residual.add_(slice.in_value(value));
    words.push_back(counts ? take_two_bits(residual, options_.threshold)
                           : torch::zeros({two_bit_words(slice.count)}, torch::kInt32));
  }
  return torch::cat(words).view(torch::kUInt8);
}

// ---- Pulls

void StoreClient::pull(KeyRange range, const DeviceTensors& into) {
  const bool trained = any_trained(range);
  exchange(
      [&](Server& server) {
        server.link.send(RequestHeader{
            .request = Request::kPull, .slices = server.layout.range_of(range), .trained = trained ? 1 : 0});
      },
      [&](Server& server) {
        const torch::Tensor region = server.layout.region_of(server.layout.range_of(range), server.inbox);
        server.link.receive<ReplyHeader>();
        server.link.receive_bytes(region);
        bytes_pulled_ += region.numel();
      });
  unpack(range, into);
}

void StoreClient::unpack(KeyRange range, const DeviceTensors& into) {
  sum_.on_every_device(into.size(), [&](std::size_t device) {
    const torch::NoGradGuard no_grad;
    for (const Server& server : servers_)
      for (const KeySlice& slice : server.layout.slices_of(server.layout.range_of(range)))
        if (const torch::Tensor& value = into[device][slice.key - range.first]; value.defined())
          slice.in_value(value).copy_(slice.in_block(server.inbox));
  });
}

// Asks each server for those of the rows that it has, by their number among its own rows of the key.
torch::Tensor StoreClient::pull_rows(std::size_t number, const torch::Tensor& rows) {
  const Key& key = keys()[number];
  const std::int64_t row = key.elements / key.rows;
  const torch::Tensor result = torch::empty({rows.numel(), row}, key.dtype);
  const auto slices_of = [&](const Server& server) { return server.layout.range_of({number, number + 1}); };
  const auto first_row = [&](const Server& server) {
    return server.layout.slices()[slices_of(server).first].begin / row;
  };
  const auto places_of = [&](const Server& server) {  // in `rows`, of those that the server has
    const auto slices = server.layout.slices_of(slices_of(server));
    const std::int64_t last = (slices.back().begin + slices.back().count) / row;
    return rows.ge(first_row(server)).logical_and(rows.lt(last)).nonzero().flatten();
  };
  exchange(
      [&](Server& server) {
        if (slices_of(server).size() == 0) return;
        const torch::Tensor wanted = rows.index_select(0, places_of(server)) - first_row(server);
        server.link.send(RequestHeader{.request = Request::kPullRows,
                                       .slices = slices_of(server),
                                       .count = wanted.numel(),
                                       .bytes = row * static_cast<std::int64_t>(result.element_size())});
        server.link.send_bytes(wanted.view(torch::kUInt8));
      },
      [&](Server& server) {
        if (slices_of(server).size() == 0) return;
        const torch::Tensor places = places_of(server);
        const torch::Tensor values = torch::empty({places.numel(), row}, key.dtype);
        server.link.receive<ReplyHeader>();
        server.link.receive_bytes(values.view({-1}).view(torch::kUInt8));
        torch::Tensor(result).index_copy_(0, places, values);
        bytes_pulled_ += values.numel() * static_cast<std::int64_t>(values.element_size());
      });
  return result;
}

}  // namespace lockstep
