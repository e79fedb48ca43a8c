#include "lockstep/collective/machines/gloo_messages.h"

#include <cstring>

#include "lockstep/base/text.h"
#include "lockstep/collective/machines/gloo_connection.h"
#include "lockstep/collective/torch_dtype.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Tensors = std::vector<torch::Tensor>;

// Sent as it is; the rest of a letter is data.
struct Letter {
  std::int64_t dtype = 0;
  std::int64_t count = 0;       // elements
  std::int64_t second_tag = 0;  // of what comes after the letter; 0: nothing does
};

constexpr std::size_t kLetterBytes = 4096;
constexpr std::size_t kDataInLetter = kLetterBytes - sizeof(Letter);

// Gloo moves bytes of any dtype alike.
torch::Tensor bytes_of(const torch::Tensor& tensor) { return tensor.detach().view(-1).view(torch::kUInt8); }

torch::Tensor write_letter(const Letter& letter, const torch::Tensor& data) {
  const std::size_t in_letter = letter.second_tag == 0 ? data.nbytes() : 0;
  torch::Tensor written = torch::empty({static_cast<std::int64_t>(sizeof letter + in_letter)}, torch::kUInt8);
  auto* const bytes = static_cast<std::byte*>(written.mutable_data_ptr());
  std::memcpy(bytes, &letter, sizeof letter);
  if (in_letter > 0) std::memcpy(bytes + sizeof letter, data.const_data_ptr(), in_letter);
  return written;
}

Letter read_letter(const torch::Tensor& received) {
  Letter letter;
  std::memcpy(&letter, received.const_data_ptr(), sizeof letter);
  return letter;
}

DType dtype_of(const torch::Tensor& tensor) { return *to_dtype(tensor.scalar_type()); }

std::string text_of(std::int64_t count, DType dtype) { return concat(count, " ", to_string(dtype)); }

// What a receive waits for, and what it gets.
struct Receipt {
  torch::Tensor tensor;
  int from;  // who sends it, as soon as that is known
  int tag;
  int here;
  torch::Tensor letter = torch::empty({kLetterBytes}, torch::kUInt8);

  Letter said() const { return read_letter(letter); }
  DType said_dtype() const { return static_cast<DType>(said().dtype); }
  bool fits() const { return said().count == tensor.numel() && said_dtype() == dtype_of(tensor); }

  void read_data() const {
    if (fits() && tensor.nbytes() > 0)
      std::memcpy(tensor.mutable_data_ptr(), letter.const_data_ptr<std::uint8_t>() + sizeof(Letter), tensor.nbytes());
  }

  torch::Tensor place_of_second_part() const {
    if (fits()) return bytes_of(tensor);
    return torch::empty({said().count * static_cast<std::int64_t>(size_of(said_dtype()))}, torch::kUInt8);
  }

  void check() const {
    if (fits()) return;
    throw MismatchError(
        {.what = concat("rank ", here, " wants receive of ", text_of(tensor.numel(), dtype_of(tensor)), " from rank ",
                        from, ", tag ", tag, ", rank ", from, " wants send of ", text_of(said().count, said_dtype())),
         .likely = "ranks that do not agree on what they send each other, or two messages with one tag",
         .next = "give as many elements of one dtype on both sides, or another tag"});
  }
};

C10dWork receive_second_part(Receipt& receipt, const c10d::Work& first, GlooConnection& gloo) {
  if (receipt.from == kAnyRank) receipt.from = first.sourceRank();
  const int tag = static_cast<int>(receipt.said().second_tag);
  if (tag == 0) receipt.read_data();
  if (tag == 0) return nullptr;
  Tensors place{receipt.place_of_second_part()};
  return issue_alone([&] { return gloo.recv(place, receipt.from, tag); });
}

}  // namespace

GlooMessages::GlooMessages(const HostLink& link, std::string here, bool bare)
    : gloo_(link.connection()), rank_(link.node()), here_(std::move(here)), bare_(bare) {}

GlooMessages::~GlooMessages() = default;

void GlooMessages::check_tag(int tag) const {
  if (tag <= kLargestTag) return;
  throw UsageError({.what = concat("a message with tag ", tag, " between machines"),
                    .here = here_,
                    .next = concat("use tags up to ", kLargestTag)});
}

// Second parts are told apart whatever their messages' tags: a receiver may turn to them in any order.
int GlooMessages::next_tag() {
  constexpr std::uint32_t kTags = 0x1fffffff;
  return static_cast<int>(0x40000001 | second_parts_++ % kTags << 1);
}

FuturePtr GlooMessages::start_bare(const char* what, const std::function<C10dWork()>& issue) {
  return messages_.start({.call = {what, here_}, .issue = issue});
}

FuturePtr GlooMessages::send(const torch::Tensor& tensor, int to, int tag) {
  check_tag(tag);
  Tensors whole{bytes_of(tensor)};
  if (bare_) return start_bare("send", [&] { return gloo_->send(whole, to, tag); });
  const bool in_letter = tensor.nbytes() <= kDataInLetter;
  const Letter letter{.dtype = static_cast<std::int64_t>(dtype_of(tensor)),
                      .count = tensor.numel(),
                      .second_tag = in_letter ? 0 : next_tag()};
  Tensors first{write_letter(letter, tensor)};
  const auto second_part = std::make_shared<C10dWork>();
  return messages_.start({.call = {"send", here_},
                          .issue =
                              [&] {
                                if (!in_letter)
                                  *second_part = gloo_->send(whole, to, static_cast<int>(letter.second_tag));
                                return gloo_->send(first, to, tag);
                              },
                          .next = [second_part](c10d::Work&) { return *second_part; }});
}

// A small one is read when it is waited for: all of it is in the letter.
FuturePtr GlooMessages::receive(const torch::Tensor& tensor, int from, int tag, bool alone) {
  check_tag(tag);
  Tensors whole{bytes_of(tensor)};
  if (bare_)
    return start_bare(
        "receive", [&] { return from == kAnyRank ? gloo_->recvAnysource(whole, tag) : gloo_->recv(whole, from, tag); });
  const auto receipt = std::make_shared<Receipt>(Receipt{.tensor = tensor, .from = from, .tag = tag, .here = rank_});
  Tensors letter{receipt->letter};
  return messages_.start(
      {.call = {"receive", here_, [receipt] { receipt->check(); }},
       .issue = [&] { return from == kAnyRank ? gloo_->recvAnysource(letter, tag) : gloo_->recv(letter, from, tag); },
       .next = [receipt, gloo = gloo_](c10d::Work& first) { return receive_second_part(*receipt, first, *gloo); },
       .alone = alone && tensor.nbytes() > kDataInLetter});
}

}  // namespace lockstep
