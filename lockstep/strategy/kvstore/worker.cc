// SPDX-License-Identifier: Apache-2.0
// A worker's side of a store on servers.
//
// Flow:    values of the devices -> summed here (level 1) -> link.h -> servers (level 2), and back
// Owns:    its ends of the links; for each server a block to send from and one to receive into: 2 K bytes
// Threads: one thread
// Ranks:   a worker
#include <algorithm>
#include <array>
#include <exception>

#include "lockstep/base/process/stop.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/step/two_bit.h"
#include "lockstep/strategy/kvstore/messages.h"
#include "lockstep/strategy/kvstore/store.h"

namespace lockstep {
namespace {

class KVWorker : public Store {
 public:
  KVWorker(const DistSetting& setting, Devices* devices)
      : Store(devices), setting_(setting), in_parts_(setting.in_step()) {
    for (const StoreLink& link : setting.to_servers) servers_.push_back({.link = link});
  }

  ~KVWorker() override {
    if (std::uncaught_exceptions() == 0) say_goodbye(setting_.to_servers);
  }

  int rank() const override { return setting_.number; }
  int workers() const override { return setting_.alike->size(); }
  void barrier() override { setting_.alike->barrier(); }

  Delays delays() override {
    Delays all;
    const auto add = [&all](Server& server) {
      const auto of = server.link.receive<Delays>();
      all.max = std::max(all.max, of.max);
      all.gradients += of.gradients;
      if (all.gradients > 0) all.mean += (of.mean - all.mean) * fraction(of.gradients, all.gradients);
    };
    if (keys().empty()) return all;
    exchange([](Server& server) { server.link.send(RequestHeader{.request = Request::kDelays}); }, add);
    return all;
  }

  using Store::pull;
  using Store::push;
  using Store::push_pull;

 private:
  struct Server {
    StoreLink link;
    BlockLayout layout{};
    Tensor outbox{};
    Tensor inbox{};
    Tensors residuals{};           // [slice] what compression has left out so far
    std::vector<Pending> sends{};  // in flight
    std::vector<Pending> receives{};
  };
  struct Push {
    KeyRange keys;
    Tensors values;  // [key - keys.first] summed over the devices; undefined: none
    RequestHeader header{};
    const Tensor& of(const KeySlice& slice) const { return values[slice.key - keys.first]; }
  };

  // ---- Requests

  // Asks all servers, then hears all of them. dist_bounded: the first server decides whose turn it is, so the others are
  // asked after it has replied.
  template <class Ask, class Hear>
  void exchange(const Ask& ask, const Hear& hear) {
    const auto finish_with = [&](Server& server) {
      finish(server.sends);
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
    const size_t first = setting_.options.kvstore.kind == KVStoreKind::kDistBounded ? 1 : all.size();
    for (const auto& some : {all.first(first), all.subspan(first)}) {
      each(some, ask);
      each(some, finish_with);
    }
  }

  // Tells the other servers, so that they do not report this worker as the one that is lost.
  void give_up(const Server& lost, const PeerLost& error) {
    const std::string what = concat("a server of the store is lost, or has given up: server ", &lost - servers_.data(),
                                    " (rank ", lost.link.peer_in_job(), "): ", error.text().what);
    setting_.abandon(what);
    throw PeerLost({.what = what,
                    .here = concat("worker ", setting_.number),
                    .likely = "that server or, with dist_sync, another worker died or stopped",
                    .next = "run again with --resume to go on from the last checkpoint"});
  }

  static void acknowledged(Server& server) { server.link.receive<ReplyHeader>(); }

  void create(const Tensors& values) override {
    const Push all{.keys = {0, keys().size()}, .values = values};
    const int64_t split_above = setting_.options.kvstore.split_above;
    auto layouts = plan_keys(keys(), servers_.size(), split_above);
    for (size_t i = 0; i < servers_.size(); ++i) {
      Server& server = servers_[i];
      server.layout = std::move(layouts[i]);
      server.outbox = server.link.allocate(server.layout.bytes());
      server.inbox = server.link.allocate(server.layout.bytes());
      server.residuals.resize(server.layout.slices().size());
    }
    exchange(
        [&](Server& server) {
          server.link.send(RequestHeader{.request = Request::kInit, .count = std::ssize(keys()), .bytes = split_above});
          server.link.send_all(std::span(keys()));
          if (setting_.number > 0) return;
          pack(server, server.layout.range_of(all.keys), all);
          server.sends.push_back(server.link.start_sending(server.outbox));
        },
        acknowledged);
  }

  void set_optimizer(const UpdateOptions& options) override {
    require_possible(options);
    in_parts_ = setting_.in_step() && options.clipping.max_norm == 0;  // that norm is of all gradients
    exchange(
        [&](Server& server) {
          server.link.send(RequestHeader{.request = Request::kOptimizer});
          server.link.send(options);
        },
        acknowledged);
  }

  // A server knows only its own slices.
  void require_possible(const UpdateOptions& options) const {
    require(options.clipping.max_norm == 0 || servers_.size() == 1,
            "clipping by norm on several servers: none of them knows the norm of all gradients", "use one server");
    if (!layerwise(options.optimizer)) return;
    for (const Server& server : servers_)
      for (const KeySlice& slice : server.layout.slices())
        require(
            !slice.trained || slice.count == keys()[slice.key].elements,
            concat(name_of(options.optimizer), " takes norms over whole keys, but ", key_name(slice.key), " is split"),
            "make the store with a larger split_above");
  }

  // ---- Pushes

  bool any_trained(KeyRange range) const {
    return std::ranges::any_of(std::span(keys()).subspan(range.first, range.size()), &Key::trained);
  }

  Push make_push(Request request, KeyRange keys, const DeviceTensors& values, const PushOptions& options) {
    const bool trained = any_trained(keys);
    const CompressionOptions& compression = setting_.options.compression;
    const double threshold = compression.amount == 0 ? 0.5 : compression.amount;
    PushOptions known = options;
    if (known.examples == 0) known.examples = known.samples;
    return {.keys = keys,
            .values = sum(on_host(values, keys.first), keys.first),
            .header = {.request = request,
                       .trained = trained,
                       .push = known,
                       .devices = std::ssize(values),
                       .threshold = trained && compression.kind == Compression::kTwoBit ? threshold : 0,
                       .stopping = has_agreed_to_stop()}};
  }

  // Starts to send the header, which of the slices have a value, and the values, part by part: each is packed or compressed while
  // those before it are under way. Waits for nothing: a server takes the flags only after the header, so waiting for them to leave would
  // cost a round trip for each server.
  void start_push(Server& server, const Push& push, std::span<const SliceRange> parts) {
    RequestHeader header = push.header;
    header.slices = server.layout.range_of(push.keys);
    std::vector<uint8_t> has_value;
    for (const KeySlice& slice : server.layout.slices_of(header.slices)) has_value.push_back(push.of(slice).defined());
    server.sends.push_back(server.link.start_sending_copy(std::span<const RequestHeader>(&header, 1)));
    server.sends.push_back(server.link.start_sending_copy(std::span<const uint8_t>(has_value)));
    for (const SliceRange part : parts) {
      Tensor payload;
      if (header.threshold > 0) {
        payload = compress(server, part, push);
      } else {
        pack(server, part, push);
        payload = server.layout.region_of(part, server.outbox);
      }
      server.sends.push_back(server.link.start_sending(payload));
      bytes_pushed_ += payload.numel();
    }
  }

  void start_pull(Server& server, SliceRange slices) {
    const Tensor region = server.layout.region_of(slices, server.inbox);
    server.receives.push_back(server.link.start_receiving(region));
    bytes_pulled_ += region.numel();
  }

  void push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) override {
    const torch::NoGradGuard no_grad;
    const Push push = make_push(Request::kPush, keys, values, options);
    exchange([&](Server& server) { start_push(server, push, std::array{server.layout.range_of(keys)}); }, acknowledged);
  }

  // Each server's slices of the keys in parts (BlockLayout::parts_of), K/S bytes each way:
  //
  //   1. post the receives of all parts     into the inbox
  //   2. start to send the header and the flags
  //   3. per part: pack or compress it into the outbox, start to send it
  //
  // Nothing here waits for the server to merge: server.cc says why this cannot deadlock.
  void push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                 const PushOptions& options) override {
    if (!in_parts_) return Store::push_pull(keys, values, into, options);
    const torch::NoGradGuard no_grad;
    const Push push = make_push(Request::kPushPull, keys, values, options);
    exchange(
        [&](Server& server) {
          const auto parts = server.layout.parts_of(server.layout.range_of(keys));
          for (const SliceRange part : parts) start_pull(server, part);
          start_push(server, push, parts);
        },
        [](Server& server) { finish(server.receives); });
    unpack(keys, into);
  }

  void pack(const Server& server, SliceRange slices, const Push& push) {
    for (const KeySlice& slice : server.layout.slices_of(slices))
      if (const Tensor& value = push.of(slice); value.defined())
        slice.in_block(server.outbox).copy_(slice.in_value(value));
  }

  // The 2-bit codes of all slices, one after the other, as bytes. What they leave out stays in the residuals, and is added
  // to the next push. A gradient of no samples, which the server ignores, leaves the residuals as they are.
  Tensor compress(Server& server, SliceRange range, const Push& push) {
    Tensors words{torch::empty({0}, torch::kInt32)};
    for (size_t i = range.first; i < range.last; ++i) {
      const KeySlice& slice = server.layout.slices()[i];
      Tensor& residual = server.residuals[i];
      if (!residual.defined()) residual = torch::zeros({slice.count}, slice.dtype);
      const Tensor& value = push.of(slice);
      const bool counts = value.defined() && push.header.push.samples > 0;
      if (counts) residual.add_(slice.in_value(value));
      words.push_back(counts ? take_two_bits(residual, push.header.threshold)
                             : torch::zeros({two_bit_words(slice.count)}, torch::kInt32));
    }
    return torch::cat(words).view(torch::kUInt8);
  }

  // ---- Pulls

  void pull(KeyRange range, const DeviceTensors& into) override {
    const bool trained = any_trained(range);
    exchange(
        [&](Server& server) {
          server.link.send(
              RequestHeader{.request = Request::kPull, .slices = server.layout.range_of(range), .trained = trained});
        },
        [&](Server& server) {
          acknowledged(server);
          start_pull(server, server.layout.range_of(range));
          finish(server.receives);
        });
    unpack(range, into);
  }

  void unpack(KeyRange range, const DeviceTensors& into) {
    on_every_device(into.size(), [&](size_t device) {
      const torch::NoGradGuard no_grad;
      for (const Server& server : servers_)
        for (const KeySlice& slice : server.layout.slices_of(server.layout.range_of(range)))
          if (const Tensor& value = into[device][slice.key - range.first]; value.defined())
            slice.in_value(value).copy_(slice.in_block(server.inbox));
    });
  }

  // Asks each server for those of the rows that it has, by their number among its own rows of the key.
  Tensor pull_rows(size_t number, const Tensor& rows) override {
    const Key& key = keys()[number];
    const int64_t row = key.elements / key.rows;
    Tensor result = torch::empty({rows.numel(), row}, key.dtype);
    Tensors places(servers_.size());  // [server] in `rows`, of those that it has
    const auto places_of = [&](const Server& server) -> Tensor& { return places[&server - servers_.data()]; };
    exchange(
        [&](Server& server) {
          const SliceRange range = server.layout.range_of({number, number + 1});
          if (range.size() == 0) return;
          const auto slices = server.layout.slices_of(range);
          const int64_t first = slices.front().begin / row;
          const int64_t last = (slices.back().begin + slices.back().count) / row;
          places_of(server) = rows.ge(first).logical_and(rows.lt(last)).nonzero().flatten();
          const Tensor wanted = rows.index_select(0, places_of(server)) - first;
          server.link.send(RequestHeader{.request = Request::kPullRows,
                                         .slices = range,
                                         .count = wanted.numel(),
                                         .bytes = row * to_int64(result.element_size())});
          server.link.send_bytes(wanted.view(torch::kUInt8));
        },
        [&](Server& server) {
          const Tensor& found = places_of(server);
          if (!found.defined()) return;
          const Tensor values = torch::empty({found.numel(), row}, key.dtype);
          server.link.receive_bytes(values.view({-1}).view(torch::kUInt8));
          result.index_copy_(0, found, values);
          bytes_pulled_ += to_int64(values.nbytes());
        });
    return result;
  }

  DistSetting setting_;
  std::vector<Server> servers_;
  bool in_parts_;  // a slice can be updated without the gradients of the others
};

}  // namespace

std::unique_ptr<Store> make_kv_worker(const DistSetting& setting, Devices* devices) {
  return std::make_unique<KVWorker>(setting, devices);
}

}  // namespace lockstep
