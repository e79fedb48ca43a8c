#include "lockstep/kvstore.h"

#include <algorithm>
#include <exception>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/gradient/two_bit.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/kvstore/optimizer_message.h"

namespace lockstep {
namespace {

torch::Tensor bytes_of(const std::vector<KeySlice>& slices) {
  return torch::from_blob(const_cast<KeySlice*>(slices.data()),
                          {static_cast<std::int64_t>(slices.size() * sizeof(KeySlice))}, torch::kUInt8);
}

// Those of `rows` that slices of one key have, counted from the first one's; and where they stand in `rows`.
struct RowsHere {
  torch::Tensor numbers;
  torch::Tensor places;
};
RowsHere rows_in(std::span<const KeySlice> slices, const torch::Tensor& rows, std::int64_t elements_per_row) {
  const std::int64_t first = slices.front().begin / elements_per_row;
  const std::int64_t last = (slices.back().begin + slices.back().count) / elements_per_row;
  const torch::Tensor places = rows.ge(first).logical_and(rows.lt(last)).nonzero().flatten();
  return {.numbers = (rows.index_select(0, places) - first).contiguous(), .places = places};
}

}  // namespace

DistKVStore::DistKVStore(const DistKVStoreOptions& options, std::vector<Link> servers, Devices* devices)
    : options_(options), sum_(SumOn::kCpu, devices) {
  for (Link& link : servers) servers_.push_back({.link = std::move(link)});
}

DistKVStore::~DistKVStore() {
  if (std::uncaught_exceptions() > 0) return;
  for (const Server& server : servers_) try {
      server.link.send(QuestionHeader{.question = Question::kGoodbye});
    } catch (const std::exception&) {  // it is gone already
    }
}

// Asks all servers, then hears all of them. The first server gates for dist_bounded: the others are asked after it.
template <class Ask, class Answer>
void DistKVStore::with_servers(const Ask& ask, const Answer& answer) {
  const auto finish = [&](Server& server) {
    for (Work& work : server.sending) work.wait();
    server.sending.clear();
    answer(server);
  };
  const auto each = [&](std::span<Server> some, const auto& call) {
    for (Server& server : some) try {
        call(server);
      } catch (const PeerLost& error) {
        give_up(server, error);
      }
  };
  const std::span<Server> all(servers_);
  const std::size_t first = options_.consistency == Consistency::kBounded ? 1 : all.size();
  for (const auto& some : {all.first(first), all.subspan(first)}) {
    each(some, ask);
    each(some, finish);
  }
}

// The other servers hear of it, so that they do not take this worker for the one that is lost.
void DistKVStore::give_up(const Server& lost, const PeerLost& error) {
  const std::string what = concat("a server of the store is lost, or has given up: server ", &lost - servers_.data(),
                                  " (rank ", lost.link.peer_in_job(), "): ", error.text().what);
  abandon(what);
  throw PeerLost({.what = what,
                  .here = concat("worker ", options_.worker),
                  .likely = "that server or, with dist_sync, another worker died or stopped",
                  .next = "run again with --resume to go on from the last checkpoint"});
}

// To several servers at the same time.
void DistKVStore::send_payload(Server& server, const torch::Tensor& bytes) {
  if (servers_.size() == 1) return server.link.send_bytes(bytes);
  if (bytes.numel() > 0) server.sending.push_back(server.link.start_sending(bytes));
}

bool DistKVStore::any_trained(KeyRange range) const {
  return std::any_of(keys().begin() + range.first, keys().begin() + range.last,
                     [](const Key& key) { return key.trained; });
}

void DistKVStore::create(const std::vector<torch::Tensor>& values) {
  const KeyRange all{0, static_cast<std::int64_t>(keys().size())};
  const auto dense = dense_views(values);
  auto layouts = plan_keys(keys(), {.servers = static_cast<int>(servers_.size()), .split_above = options_.split_above});
  for (std::size_t i = 0; i < servers_.size(); ++i) {
    servers_[i].layout = std::move(layouts[i]);
    servers_[i].outbox = servers_[i].link.allocate(servers_[i].layout.bytes());
    servers_[i].inbox = servers_[i].link.allocate(servers_[i].layout.bytes());
    servers_[i].residuals.resize(servers_[i].layout.slices().size());
  }
  with_servers(
      [&](Server& server) {
        const auto& slices = server.layout.slices();
        server.link.send(
            QuestionHeader{.question = Question::kInit, .count = static_cast<std::int64_t>(slices.size())});
        server.link.send_bytes(bytes_of(slices));
        if (options_.worker > 0) return;
        put(server, server.layout.range_of(all), {.keys = all, .values = dense, .header = {}});
        send_payload(server, server.outbox);
      },
      [](Server& server) { server.link.receive<AnswerHeader>(); });
}

void DistKVStore::abandon(const std::string& reason) const {
  for (const Server& server : servers_) server.link.abandon(reason);
}

void DistKVStore::set_optimizer(const StrategyOptions& options) {
  in_parts_ = options.clipping.max_norm == 0;
  with_servers(
      [&](Server& server) {
        server.link.send(QuestionHeader{.question = Question::kOptimizer});
        server.link.send(to_message(options));
      },
      [](Server& server) { server.link.receive<AnswerHeader>(); });
}

DistKVStore::Push DistKVStore::to_push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) {
  const bool trained = any_trained(keys);
  return {.keys = keys,
          .values = dense_views(sum_.sum(values, keys.first)),
          .header = {.trained = trained ? 1 : 0,
                     .samples = options.samples,
                     .devices = static_cast<std::int64_t>(values.size()),
                     .loss = options.loss,
                     .learning_rate = options.learning_rate,
                     .threshold = trained ? options_.threshold : 0}};
}

void DistKVStore::push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) {
  const torch::NoGradGuard no_grad;
  const Push push = to_push(keys, values, options);
  with_servers(
      [&](Server& server) {
        QuestionHeader header = push.header;
        header.question = Question::kPush;
        header.slices = server.layout.range_of(keys);
        const torch::Tensor payload = payload_of(server, header.slices, push);
        server.link.send(header);
        server.link.send_bytes(flags_of(server.layout.slices_of(header.slices), push));
        send_payload(server, payload);
        bytes_pushed_ += payload.numel();
      },
      [](Server& server) { server.link.receive<AnswerHeader>(); });
}

void DistKVStore::push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                            const PushOptions& options) {
  if (options_.consistency != Consistency::kSync || !in_parts_) return KVStore::push_pull(keys, values, into, options);
  const torch::NoGradGuard no_grad;
  const Push push = to_push(keys, values, options);
  with_servers([&](Server& server) { start_push_pull(server, push); },
               [](Server& server) {
                 for (Work& work : server.receiving) work.wait();
                 server.receiving.clear();
               });
  take(keys, into);
}

// All answers are expected before anything is sent: they come while later parts go.
void DistKVStore::start_push_pull(Server& server, const Push& push) {
  QuestionHeader header = push.header;
  header.question = Question::kPushPull;
  header.slices = server.layout.range_of(push.keys);
  const auto parts = server.layout.parts_of(header.slices, part_bytes(server.layout.bytes()));
  for (const SliceRange part : parts)
    if (const torch::Tensor region = server.layout.region_of(part, server.inbox); region.numel() > 0) {
      server.receiving.push_back(server.link.start_receiving(region));
      bytes_pulled_ += region.numel();
    }
  server.link.send(header);
  server.link.send_bytes(flags_of(server.layout.slices_of(header.slices), push));
  for (const SliceRange part : parts)
    if (const torch::Tensor payload = payload_of(server, part, push); payload.numel() > 0) {
      server.sending.push_back(server.link.start_sending(payload));
      bytes_pushed_ += payload.numel();
    }
}

// Which of the slices have a value, one by one.
torch::Tensor DistKVStore::flags_of(std::span<const KeySlice> slices, const Push& push) {
  torch::Tensor flags = torch::zeros({static_cast<std::int64_t>(slices.size())}, torch::kUInt8);
  for (std::size_t i = 0; i < slices.size(); ++i)
    if (push.of(slices[i]).defined()) flags.mutable_data_ptr<std::uint8_t>()[i] = 1;
  return flags;
}

torch::Tensor DistKVStore::payload_of(Server& server, SliceRange slices, const Push& push) const {
  if (push.header.threshold > 0) return two_bits_of(server, slices, push);
  put(server, slices, push);
  return server.layout.region_of(slices, server.outbox);
}

void DistKVStore::put(Server& server, SliceRange slices, const Push& push) const {
  for (const KeySlice& slice : server.layout.slices_of(slices))
    if (const torch::Tensor& value = push.of(slice); value.defined())
      slice.in(server.outbox).copy_(value.narrow(0, slice.begin, slice.count));
}

// The words of all slices, one after the other, as bytes. What they leave out stays for the next push.
torch::Tensor DistKVStore::two_bits_of(Server& server, SliceRange range, const Push& push) const {
  std::vector<torch::Tensor> words{torch::empty({0}, torch::kInt32)};
  for (const KeySlice& slice : server.layout.slices_of(range)) {
    torch::Tensor& residual = server.residuals[static_cast<std::size_t>(&slice - server.layout.slices().data())];
    if (!residual.defined()) residual = torch::zeros({slice.count}, slice.scalar_type());
    const torch::Tensor& value = push.of(slice);
    const bool counts = value.defined() && push.header.samples > 0;  // else the server leaves it out
    if (counts) residual.add_(value.narrow(0, slice.begin, slice.count));
    words.push_back(counts ? take_two_bits(residual, options_.threshold)
                           : torch::zeros({two_bit_words(slice.count)}, torch::kInt32));
  }
  return torch::cat(words).view(torch::kUInt8);
}

void DistKVStore::pull(KeyRange range, const DeviceTensors& into) {
  const bool trained = any_trained(range);
  with_servers(
      [&](Server& server) {
        server.link.send(QuestionHeader{
            .question = Question::kPull, .slices = server.layout.range_of(range), .trained = trained ? 1 : 0});
      },
      [&](Server& server) {
        const torch::Tensor region = server.layout.region_of(server.layout.range_of(range), server.inbox);
        server.link.receive<AnswerHeader>();
        server.link.receive_bytes(region);
        bytes_pulled_ += region.numel();
      });
  take(range, into);
}

void DistKVStore::take(KeyRange range, const DeviceTensors& into) {
  sum_.on_every_device(into.size(), [&](std::size_t device) {
    const torch::NoGradGuard no_grad;
    for (const Server& server : servers_)
      for (const KeySlice& slice : server.layout.slices_of(server.layout.range_of(range))) {
        const torch::Tensor& whole = into[device][static_cast<std::size_t>(slice.key - range.first)];
        if (!whole.defined()) continue;  // a gradient that no worker has
        dense_view(whole.detach()).narrow(0, slice.begin, slice.count).copy_(slice.in(server.inbox));
      }
  });
}

torch::Tensor DistKVStore::row_sparse_pull(const std::string& name, const torch::Tensor& rows) {
  const std::int64_t number = number_of(name);
  const Key& key = keys()[static_cast<std::size_t>(number)];
  require_rows(key, rows);
  const KeyRange only{number, number + 1};
  const std::int64_t row = key.elements / key.rows;
  std::vector<std::int64_t> sizes = like(number).sizes().vec();
  sizes.front() = rows.numel();
  const torch::Tensor result = torch::empty({rows.numel(), row}, key.dtype);
  const auto wanted_of = [&](const Server& server) {
    const auto slices = server.layout.slices_of(server.layout.range_of(only));
    return slices.empty() ? RowsHere{} : rows_in(slices, rows, row);
  };
  with_servers(
      [&](Server& server) {
        const RowsHere wanted = wanted_of(server);
        if (!wanted.numbers.defined()) return;
        server.link.send(QuestionHeader{.question = Question::kPullRows,
                                        .slices = server.layout.range_of(only),
                                        .count = wanted.numbers.numel(),
                                        .bytes = row * static_cast<std::int64_t>(result.element_size())});
        server.link.send_bytes(wanted.numbers.view(torch::kUInt8));
      },
      [&](Server& server) {
        const RowsHere wanted = wanted_of(server);
        if (!wanted.numbers.defined()) return;
        const torch::Tensor values = torch::empty({wanted.numbers.numel(), row}, key.dtype);
        server.link.receive<AnswerHeader>();
        server.link.receive_bytes(values.view({-1}).view(torch::kUInt8));
        torch::Tensor(result).index_copy_(0, wanted.places, values);
        bytes_pulled_ += static_cast<std::int64_t>(values.nbytes());
      });
  return result.view(sizes);
}

}  // namespace lockstep
