#include "lockstep/collective/machines/machine_exchange.h"

#include <cstring>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using ExchangeCounts = std::vector<std::int64_t>;

std::size_t elements_of(const Collective& call) {
  const torch::Tensor& some = call.operation == Operation::kScatter || !call.input.defined() ? call.output : call.input;
  return static_cast<std::size_t>(some.numel());
}

}  // namespace

// All ranks of a machine go on together: while one has not heard what the other machines want, none sends.
void HostExchange::check(const Collective& call) {
  const Wish mine = wish_of(call, elements_of(call));
  inside_.run_as(intent_of(mine), {.operation = Operation::kBarrier});
  if (inside_.rank() == 0) {
    check_.begin(*between_, mine);
    check_.finish(*between_);
  }
  inside_.barrier();
}

// Everything that this rank gives and gets, part r of each for or from rank r.
void HostExchange::exchange(const torch::Tensor& input, const ExchangeCounts& send, const torch::Tensor& output,
                            const ExchangeCounts& receive) {
  const torch::Tensor& some = input.defined() ? input : output;
  const auto size = static_cast<std::size_t>(some.element_size());
  const auto* from = input.defined() ? static_cast<const std::byte*>(input.const_data_ptr()) : nullptr;
  auto* to = output.defined() ? static_cast<std::byte*>(output.mutable_data_ptr()) : nullptr;
  for (int rank = 0; rank < all_.nodes(); ++rank) {
    const std::size_t sent = static_cast<std::size_t>(send[static_cast<std::size_t>(rank)]) * size;
    const std::size_t received = static_cast<std::size_t>(receive[static_cast<std::size_t>(rank)]) * size;
    if (rank == all_.node() && received > 0) std::memcpy(to, from, received);
    if (rank != all_.node()) {
      all_.receive(rank, to, received, transfers_);
      all_.send(rank, from, sent, transfers_);
    }
    from += sent;
    to += received;
  }
  all_.wait(transfers_);
}

void HostExchange::gather(const Collective& call) {
  ExchangeCounts send(static_cast<std::size_t>(all_.nodes()), 0);
  send[static_cast<std::size_t>(call.root)] = call.input.numel();
  const std::int64_t received = call.output.defined() ? call.input.numel() : 0;
  exchange(call.input, send, call.output, ExchangeCounts(send.size(), received));
}

void HostExchange::scatter(const Collective& call) {
  ExchangeCounts receive(static_cast<std::size_t>(all_.nodes()), 0);
  receive[static_cast<std::size_t>(call.root)] = call.output.numel();
  const std::int64_t sent = call.input.defined() ? call.output.numel() : 0;
  exchange(call.input, ExchangeCounts(receive.size(), sent), call.output, receive);
}

void HostExchange::all_to_all(const Collective& call, const ExchangeCounts& theirs) {
  const std::int64_t even = call.input.numel() / all_.nodes();
  const ExchangeCounts send = call.counts.empty() ? ExchangeCounts(static_cast<std::size_t>(all_.nodes()), even) : call.counts;
  const ExchangeCounts& receive = call.counts.empty() ? send : call.receive_counts;
  for (std::size_t rank = 0; rank < theirs.size(); ++rank)
    if (theirs[rank] != receive[rank])
      throw MismatchError({.what = concat("all_to_all: rank ", rank, " sends ", theirs[rank], " elements to rank ",
                                          all_.node(), ", which expects ", receive[rank]),
                           .likely = "lists of rows that do not fit together",
                           .next = "leave receive_rows out: then they are exchanged"});
  exchange(call.input, send, call.output, receive);
}

void HostExchange::give_up() {
  check_.give_up();
  transfers_.clear();
}

}  // namespace lockstep
