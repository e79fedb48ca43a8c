// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/gloo_messages.h"

#include <limits>

#include "lockstep/base/sockets/received.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/gloo_network.h"

namespace lockstep {
namespace {

using torch::Tensor;

// The first transfer of a message: sent as raw bytes, followed by the data if it is small.
struct MessageHeader {
  uint64_t dtype = 0;
  uint64_t count = 0;      // elements
  int64_t second_tag = 0;  // of the transfer with the data; 0: the data is in this one
};

constexpr size_t kFirstBytes = 4096;
constexpr size_t kDataInFirst = kFirstBytes - sizeof(MessageHeader);

// Gloo moves bytes of any dtype alike.
Tensor bytes_of(const Tensor& tensor) { return tensor.detach().view(-1).view(torch::kUInt8); }

Tensor write_header(const MessageHeader& header, const Tensor& data) {
  const size_t data_bytes = header.second_tag == 0 ? data.nbytes() : 0;
  Tensor written = torch::empty({to_int64(sizeof header + data_bytes)}, torch::kUInt8);
  auto* const bytes = static_cast<std::byte*>(written.mutable_data_ptr());
  std::memcpy(bytes, &header, sizeof header);
  if (data_bytes > 0) std::memcpy(bytes + sizeof header, data.const_data_ptr(), data_bytes);
  return written;
}

std::string text_of(size_t count, DType dtype) { return concat(count, " ", to_string(dtype)); }

// A receive that was started, and its first transfer.
struct Receive {
  TensorCall call;
  int from;  // the sender, as soon as it is known
  int here;
  Tensor first = torch::empty({kFirstBytes}, torch::kUInt8);
  MessageHeader header{};  // once the first transfer is there

  DType sent_dtype() const { return static_cast<DType>(header.dtype); }
  bool fits() const { return header.count == call.count && sent_dtype() == call.dtype; }

  void check() const {
    if (fits()) return;
    throw MismatchError(
        {.what = concat("rank ", here, " wants receive of ", text_of(call.count, call.dtype), " from rank ", from,
                        ", tag ", call.tag, ", rank ", from, " wants send of ", text_of(header.count, sent_dtype())),
         .likely = "ranks that disagree on what they send, or two messages with one tag",
         .next = "give the same dtype and number of elements on both sides, or another tag"});
  }
};

// Null where the first transfer had the data.
C10dWork receive_second(Receive& receive, const c10d::Work& first, GlooConnection& gloo) {
  if (receive.from == kAnyRank) receive.from = first.sourceRank();
  const auto* const arrived = receive.first.const_data_ptr<uint8_t>();
  MessageHeader& header = receive.header;
  std::memcpy(&header, arrived, sizeof header);
  const Received sender(concat("rank ", receive.from));
  sender.in(static_cast<int64_t>(header.dtype), 0, kDTypes - 1, "the dtype's number");
  sender.in(header.second_tag, 0, std::numeric_limits<int>::max(), "the tag of the second transfer");
  const auto bytes = static_cast<size_t>(
      sender.bytes(static_cast<int64_t>(header.count), to_int64(size_of(receive.sent_dtype())), "the message"));
  if (header.second_tag == 0) {
    sender.require(bytes <= kDataInFirst, concat("its first part has ", bytes, " bytes of data"));
    if (receive.fits() && bytes > 0) std::memcpy(receive.call.output, arrived + sizeof header, bytes);
    return nullptr;
  }
  const auto dropped = [bytes] { return torch::empty({to_int64(bytes)}, torch::kUInt8); };
  Tensors place{receive.fits() ? bytes_of(receive.call.output_tensor) : dropped()};
  return issue_alone([&] { return gloo.recv(place, receive.from, to_int(header.second_tag)); });
}

}  // namespace

GlooMessages::GlooMessages(const GlooLink& link, std::string here, bool headers)
    : gloo_(link.connection()), rank_(link.rank()), here_(std::move(here)), headers_(headers) {}

GlooMessages::~GlooMessages() = default;

void GlooMessages::set_timeout(milliseconds timeout) { gloo_->setTimeout(timeout); }

int GlooMessages::tag_of(const Call& call) const {
  if (call.tag <= kLargestTag) return to_int(call.tag);
  throw UsageError({.what = concat("a message with tag ", call.tag, " between machines"),
                    .here = here_,
                    .next = concat("use tags up to ", kLargestTag)});
}

// Each second transfer has a tag of its own: a receiver may take messages in any order.
int GlooMessages::next_tag() {
  constexpr uint32_t kTags = 0x1fffffff;
  return to_int(0x40000001 | second_transfers_++ % kTags << 1);
}

// The second transfer is issued before the first: when the receiver knows its tag, it is on its way.
FuturePtr GlooMessages::send(const TensorCall& call) {
  const int to = call.peer;
  const int tag = tag_of(call);
  Tensors data{bytes_of(call.input_tensor)};
  if (!headers_) return messages_.start({.call = {"send", here_}, .issue = [&] { return gloo_->send(data, to, tag); }});
  const int second_tag = call.input_tensor.nbytes() <= kDataInFirst ? 0 : next_tag();
  const auto dtype = static_cast<uint64_t>(call.dtype);
  Tensors first{write_header({dtype, call.count, second_tag}, call.input_tensor)};
  const auto second = std::make_shared<C10dWork>();
  return messages_.start({.call = {"send", here_},
                          .issue =
                              [&] {
                                if (second_tag != 0) *second = gloo_->send(data, to, second_tag);
                                return gloo_->send(first, to, tag);
                              },
                          .next = [second](c10d::Work&) { return *second; }});
}

// A small message needs no thread: all of it arrives in the first transfer, and is copied when it is waited for.
FuturePtr GlooMessages::receive(const TensorCall& call, bool in_background) {
  const int tag = tag_of(call);
  const auto issue = [&](const Tensor& place) {
    Tensors places{place};
    const int from = call.peer;
    return from == kAnyRank ? gloo_->recvAnysource(places, tag) : gloo_->recv(places, from, tag);
  };
  const auto issue_data = [&] { return issue(bytes_of(call.output_tensor)); };
  if (!headers_) return messages_.start({.call = {"receive", here_}, .issue = issue_data});
  const auto receive = std::make_shared<Receive>(Receive{.call = call, .from = call.peer, .here = rank_});
  return messages_.start(
      {.call = {"receive", here_, [receive] { receive->check(); }},
       .issue = [&] { return issue(receive->first); },
       .next = [receive, gloo = gloo_](c10d::Work& first) { return receive_second(*receive, first, *gloo); },
       .in_background = in_background && call.output_tensor.nbytes() > kDataInFirst});
}

}  // namespace lockstep
