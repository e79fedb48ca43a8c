#include "lockstep/collective/shm/transfer.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/thresholds.h"
#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

class Sending final : public Transfer {
 public:
  Sending(GroupState& group, const Send& call, std::uint32_t& sent)
      : group_(group), call_(call), bytes_(call.count * size_of(call.dtype)), sent_(sent) {}

  bool progress() override {
    if (letter_ == nullptr && !post_letter()) return false;
    if (letter_->kind == Place::Kind::kSlot) return true;
    if (staging_.data() != nullptr) fill();
    return answered();
  }
  int peer() const override { return call_.to; }
  bool holds_up(const Transfer& later) const override {
    const auto* other = dynamic_cast<const Sending*>(&later);
    return letter_ == nullptr && other != nullptr && other->call_.to == call_.to;
  }
  std::string describe() const override {
    return concat("send of ", call_.count, " ", to_string(call_.dtype), " to rank ", call_.to, ", tag ", call_.tag);
  }

 private:
  bool post_letter();
  void write_letter(Letter& letter);
  Place place_data();
  void fill();
  bool answered();
  void ring() { group_.area().progress(call_.to).bell.ring(); }

  GroupState& group_;
  Send call_;
  std::size_t bytes_;
  std::uint32_t& sent_;
  Letter* letter_ = nullptr;
  Memory staging_;
};

bool Sending::post_letter() {
  for (int i = 0; i < kLettersPerPair; ++i) {
    Letter& letter = group_.area().letter(group_.rank(), call_.to, i);
    if (letter.state.load(kAcquire) != Letter::kFree) continue;
    write_letter(letter);
    letter_ = &letter;
    letter.state.store(Letter::kSent, kRelease);
    ring();
    return true;
  }
  return false;
}

void Sending::write_letter(Letter& letter) {
  const Place place = place_data();
  letter.order.store(sent_++, kRelaxed);
  letter.filled.store(0, kRelaxed);
  letter.emptied.store(0, kRelaxed);
  letter.tag = call_.tag;
  letter.count = call_.count;
  letter.dtype = call_.dtype;
  letter.kind = place.kind;
  letter.owner = place.owner;
  letter.at = place.at;
  letter.refused = false;
  if (place.kind == Place::Kind::kSlot)
    copy_bytes(letter.data.data(), static_cast<const std::byte*>(call_.data), bytes_);
}

Place Sending::place_data() {
  if (bytes_ <= kLetterBytes) return {.kind = Place::Kind::kSlot};
  Place place = group_.locate(call_.data, bytes_);
  if (place.kind != Place::Kind::kPrivate) return place;
  const int mine = group_.machine_rank(group_.rank());
  staging_ = group_.machine().arena(mine)->allocate(kStagingChunks * group_.staging_bytes());
  return {.kind = Place::Kind::kPrivate, .owner = static_cast<std::uint16_t>(mine), .at = staging_.offset()};
}

void Sending::fill() {
  const std::size_t chunk_bytes = group_.staging_bytes();
  std::size_t chunk = letter_->filled.load(kRelaxed);
  for (; chunk * chunk_bytes < bytes_ && chunk < letter_->emptied.load(kAcquire) + std::size_t{kStagingChunks};
       ++chunk) {
    const std::size_t begin = chunk * chunk_bytes;
    show_bytes(staging_.data() + chunk % kStagingChunks * chunk_bytes,
               static_cast<const std::byte*>(call_.data) + begin, std::min(chunk_bytes, bytes_ - begin));
    letter_->filled.store(static_cast<std::uint32_t>(chunk + 1), kRelease);
    ring();
  }
}

bool Sending::answered() {
  if (letter_->state.load(kAcquire) != Letter::kAnswered) return false;
  const bool refused = letter_->refused;
  const Intent wanted = letter_->wanted;
  letter_->state.store(Letter::kFree, kRelease);
  if (refused) group_.disagree(call_.to, describe(), concat("receive of ", wanted.count, " ", to_string(wanted.dtype)));
  return true;
}

class Receiving final : public Transfer {
 public:
  Receiving(GroupState& group, const Receive& call)
      : group_(group), call_(call), bytes_(call.count * size_of(call.dtype)) {}

  bool progress() override {
    if (letter_ == nullptr && !take_letter()) return false;
    switch (letter_->kind) {
      case Place::Kind::kSlot: return take_from_letter();
      case Place::Kind::kPrivate: return empty();
      default: return take_in_place();
    }
  }
  int peer() const override { return call_.from; }
  // Its letter may come while others are looked at: it is not theirs.
  bool holds_up(const Transfer& later) const override {
    const auto* other = dynamic_cast<const Receiving*>(&later);
    if (letter_ != nullptr || other == nullptr || other->call_.tag != call_.tag) return false;
    return call_.from == kAnyRank || other->call_.from == kAnyRank || other->call_.from == call_.from;
  }
  std::string describe() const override {
    const std::string from = call_.from == kAnyRank ? "any rank" : group_.name(call_.from);
    return concat("receive of ", call_.count, " ", to_string(call_.dtype), " from ", from, ", tag ", call_.tag);
  }

 private:
  bool take_letter();
  Letter* oldest_from(int rank) const;
  void refuse();
  bool take_from_letter();
  bool take_in_place();
  bool empty();
  void answer(std::uint32_t state);

  GroupState& group_;
  Receive call_;
  std::size_t bytes_;
  Letter* letter_ = nullptr;
};

bool Receiving::take_letter() {
  const int first = call_.from == kAnyRank ? 0 : call_.from;
  const int last = call_.from == kAnyRank ? group_.size() - 1 : call_.from;
  for (int rank = first; rank <= last && letter_ == nullptr; ++rank) {
    // A first look may miss a letter that was sent while it went on, and see a later one. Whoever sees the later one
    // sees the earlier one too when looking again.
    letter_ = oldest_from(rank) == nullptr ? nullptr : oldest_from(rank);
    source = rank;
  }
  if (letter_ == nullptr) return false;
  if (letter_->count != call_.count || letter_->dtype != call_.dtype) refuse();
  letter_->state.store(Letter::kTaken, kRelaxed);
  return true;
}

Letter* Receiving::oldest_from(int rank) const {
  Letter* oldest = nullptr;
  for (int i = 0; i < kLettersPerPair; ++i) {
    Letter& letter = group_.area().letter(rank, group_.rank(), i);
    if (letter.state.load(kAcquire) != Letter::kSent || letter.tag != call_.tag) continue;
    const std::uint32_t order = letter.order.load(kRelaxed);
    if (oldest == nullptr || static_cast<std::int32_t>(order - oldest->order.load(kRelaxed)) < 0) oldest = &letter;
  }
  return oldest;
}

void Receiving::refuse() {
  const std::string theirs = concat("send of ", letter_->count, " ", to_string(letter_->dtype));
  letter_->wanted = {.operation = Operation::kReceive, .dtype = call_.dtype, .count = call_.count};
  letter_->refused = true;
  answer(letter_->kind == Place::Kind::kSlot ? Letter::kFree : Letter::kAnswered);
  group_.disagree(source, describe(), theirs);
}

bool Receiving::take_from_letter() {
  copy_bytes(static_cast<std::byte*>(call_.data), letter_->data.data(), bytes_);
  answer(Letter::kFree);
  return true;
}

bool Receiving::take_in_place() {
  const Place place{.kind = letter_->kind, .owner = letter_->owner, .at = letter_->at};
  {
    const GroupState::Touch touch(group_);
    copy_bytes(static_cast<std::byte*>(call_.data), group_.pointer(place, bytes_), bytes_);
  }
  answer(Letter::kAnswered);
  return true;
}

bool Receiving::empty() {
  const std::size_t chunk_bytes = group_.staging_bytes();
  const Place place{.kind = Place::Kind::kArena, .owner = letter_->owner, .at = letter_->at};
  const std::byte* const staging = group_.pointer(place, kStagingChunks * chunk_bytes);
  std::size_t chunk = letter_->emptied.load(kRelaxed);
  for (; chunk < letter_->filled.load(kAcquire); ++chunk) {
    const std::size_t begin = chunk * chunk_bytes;
    copy_bytes(static_cast<std::byte*>(call_.data) + begin, staging + chunk % kStagingChunks * chunk_bytes,
               std::min(chunk_bytes, bytes_ - begin));
    letter_->emptied.store(static_cast<std::uint32_t>(chunk + 1), kRelease);
    group_.area().progress(source).bell.ring();
  }
  if (chunk * chunk_bytes < bytes_) return false;
  answer(Letter::kAnswered);
  return true;
}

void Receiving::answer(std::uint32_t state) {
  letter_->state.store(state, kRelease);
  group_.area().progress(source).bell.ring();
}

}  // namespace

std::unique_ptr<Transfer> make_sending(GroupState& group, const Send& call, std::uint32_t& sent) {
  return std::make_unique<Sending>(group, call, sent);
}

std::unique_ptr<Transfer> make_receiving(GroupState& group, const Receive& call) {
  return std::make_unique<Receiving>(group, call);
}

}  // namespace lockstep::shm
