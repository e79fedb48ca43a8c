#include "lockstep/collective/shm/mailbox.h"

#include <algorithm>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/thresholds.h"

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
  std::string describe() const override {
    const std::string from = call_.from == kAnyRank ? "any rank" : concat("rank ", call_.from);
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

Mailbox::Mailbox(GroupState& group, std::chrono::milliseconds timeout)
    : group_(group),
      timeout_(timeout),
      waiter_(group.machine(), *this, timeout),
      sent_(static_cast<std::size_t>(group.size())) {}

Mailbox::~Mailbox() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (!items_.empty()) waiter_.cancel();
    changed_.notify_all();
  }
  bell().ring();
  if (thread_.joinable()) thread_.join();
}

void Mailbox::set_timeout(std::chrono::milliseconds timeout) {
  drain();
  timeout_ = timeout;
  waiter_.set_timeout(timeout);
}

void Mailbox::send(const Send& call) { finish_now(make(call)); }
int Mailbox::receive(const Receive& call) { return finish_now(make(call)); }
std::shared_ptr<WorkState> Mailbox::start(const Send& call) { return enqueue(make(call)); }
std::shared_ptr<WorkState> Mailbox::start(const Receive& call) { return enqueue(make(call)); }

std::unique_ptr<Transfer> Mailbox::make(const Send& call) {
  return std::make_unique<Sending>(group_, call, sent_[static_cast<std::size_t>(call.to)]);
}

std::unique_ptr<Transfer> Mailbox::make(const Receive& call) { return std::make_unique<Receiving>(group_, call); }

int Mailbox::machine_rank_of(const Transfer& transfer) const {
  return transfer.peer() == kAnyRank ? kNobody : group_.machine_rank(transfer.peer());
}

// On the calling thread, unless others are under way that it must not overtake.
int Mailbox::finish_now(std::unique_ptr<Transfer> transfer) {
  std::unique_lock lock(mutex_);
  if (!items_.empty()) {
    lock.unlock();
    const auto state = enqueue(std::move(transfer));
    state->wait(nullptr);
    return state->source;
  }
  doing_ = transfer->describe();
  lock.unlock();
  waiter_.begin_call();
  try {
    if (group_.machine().poisoned()) group_.machine().throw_if_poisoned(here());
    waiter_.until(bell(), machine_rank_of(*transfer), [&] { return transfer->progress(); });
  } catch (...) {
    group_.after_failure();
    throw;
  }
  return transfer->source;
}

std::shared_ptr<WorkState> Mailbox::enqueue(std::unique_ptr<Transfer> transfer) {
  auto state = std::make_shared<WorkState>();
  {
    const std::lock_guard lock(mutex_);
    items_.push_back({std::move(transfer), state, Deadline::after(timeout_)});
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    changed_.notify_all();
  }
  bell().ring();
  return state;
}

void Mailbox::drain() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return items_.empty(); });
}

void Mailbox::work() {
  while (begin_round()) {
    try {
      if (group_.machine().poisoned()) group_.machine().throw_if_poisoned(here());
      const std::uint32_t rung = bell().load();
      if (progress_all()) continue;
      waiter_.until(bell(), waiting_for_, [&] { return bell().load() != rung; });
    } catch (...) {
      group_.after_failure();
      fail_all(std::current_exception());
    }
  }
}

// Sleeps until there is something to do; false once the mailbox is closed and empty.
bool Mailbox::begin_round() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopping_ || !items_.empty(); });
  if (items_.empty()) return false;
  const Item& oldest = items_.front();
  doing_ = oldest.transfer->describe();
  waiting_for_ = machine_rank_of(*oldest.transfer);
  waiter_.begin_call(oldest.deadline);
  return true;
}

// One step of each transfer; true if any is done.
bool Mailbox::progress_all() {
  std::vector<Item*> items;
  {
    const std::lock_guard lock(mutex_);
    for (Item& item : items_) items.push_back(&item);
  }
  std::vector<const Transfer*> unfinished;
  bool any = false;
  for (Item* const item : items) {
    const bool must_wait = std::ranges::any_of(unfinished, [&](auto* one) { return one->holds_up(*item->transfer); });
    if (!must_wait && step(*item))
      any = true;
    else
      unfinished.push_back(item->transfer.get());
  }
  const std::lock_guard lock(mutex_);
  items_.remove_if([](const Item& item) { return item.state->finished(); });
  changed_.notify_all();
  return any;
}

// A disagreement ends the one transfer; anything else ends all.
bool Mailbox::step(Item& item) {
  try {
    if (!item.transfer->progress()) return false;
    item.state->source = item.transfer->source;
    item.state->finish();
  } catch (const MismatchError&) {
    item.state->finish(std::current_exception());
  }
  return true;
}

void Mailbox::fail_all(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  for (const Item& item : items_) item.state->finish(error);
  items_.clear();
  changed_.notify_all();
}

std::string Mailbox::here() const {
  const std::lock_guard lock(mutex_);
  return concat("rank ", group_.rank(), " of ", group_.size(), " in ", doing_);
}

}  // namespace lockstep::shm
