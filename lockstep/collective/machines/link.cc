// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/link.h"

#include "lockstep/base/text.h"
#include "lockstep/collective/machines/gloo_network.h"

namespace lockstep {
namespace {

// Gloo keeps the order of transfers with one tag. Users' messages may share the connection: they use other tags
// (gloo_messages.cc), odd ones and small ones. So lane 1, odd as well, is of a connection without them.
constexpr int kWatchTag = 0x7ffffffe;
constexpr int kCheckTag = 0x40000000;  // of the signatures themselves

int tag_of(const Signature& signature) {
  const std::string_view bytes(reinterpret_cast<const char*>(&signature), sizeof signature);
  return to_int(kCheckTag | (1 + std::hash<std::string_view>()(bytes) % 0x1ffffffe) << 1);
}

// A peer that is still there takes the goodbye at once; Gloo never ends a send to one that has just closed its end.
constexpr std::chrono::seconds kLongestGoodbye{1};
constexpr std::chrono::hours kAsLongAsTheLink{24 * 365};  // leave() and close() end that wait

Tensors as_tensor(const std::byte* data, size_t bytes) {
  return {torch::from_blob(const_cast<std::byte*>(data), {to_int64(bytes)}, torch::kUInt8)};
}

}  // namespace

GlooLink::GlooLink(const StorePtr& store, TransportOptions options, std::vector<std::string> names)
    : options_(std::move(options)), names_(std::move(names)), gloo_(connect_gloo(store, options_)), tag_(kCheckTag) {
  for (int step = 1; step < size(); ++step) peers_.push_back((rank() + step) % size());
}

GlooLink::~GlooLink() {
  if (watched_) watched_->abort();  // ends the watcher
}

std::shared_ptr<GlooNetwork> GlooLink::network() const { return gloo_->network; }

// ---- Losses, see Note [Who watches whom]

void GlooLink::watch(OnLoss on_loss) {
  auto tensors = as_tensor(&goodbye_, 1);
  watched_ = issue(next(), [&] { return gloo_->recv(tensors, next(), kWatchTag); });
  watcher_ = std::jthread([this, on_loss = std::move(on_loss)] {
    try {
      watched_->wait(kAsLongAsTheLink);
    } catch (const std::exception& error) {
      if (failed_on_purpose()) return;
      const auto reason = std::make_exception_ptr(lost(next(), error));
      close(reason);
      on_loss(reason);
    }
  });
}

// This rank itself closed the connections, and whoever did knows why.
bool GlooLink::failed_on_purpose() {
  const std::lock_guard lock(mutex_);
  return left_ || closed_ || timed_out_ || (wait_ends_ && wait_ends_->passed());
}

void GlooLink::leave() {
  left_ = true;
  const std::byte goodbye{};
  auto tensors = as_tensor(&goodbye, 1);
  try {
    issue_alone([&] { return gloo_->send(tensors, previous(), kWatchTag); })->wait(kLongestGoodbye);
  } catch (const std::exception&) {  // lost, closed, or gone before
  }
}

void GlooLink::close(std::exception_ptr reason) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = std::move(reason);
  for (const auto& [number, transfer] : under_way_) transfer.work->abort();
  gloo_->close();
}

void GlooLink::set_timeout(milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  options_.timeout = timeout;
}

// ---- Signatures

void GlooLink::begin(const Signature& mine) { tag_ = tag_of(mine); }

void GlooLink::begin_check(const Signature& mine) {
  begin(mine);
  mine_ = mine;
  checked_ = false;
  turn_ ^= 1U;
  if (arriving_[turn_].empty()) expect_signature(turn_);
  try {
    expect_signature(turn_ ^ 1U);
  } catch (const PeerLost&) {  // it may leave after this call
  }
  start_send(next(), reinterpret_cast<const std::byte*>(&mine_), sizeof mine_, leaving_, kCheckTag);
}

void GlooLink::expect_signature(size_t turn) {
  start_receive(previous(), reinterpret_cast<std::byte*>(&previous_[turn]), sizeof mine_, arriving_[turn], kCheckTag);
}

void GlooLink::check() {
  if (std::exchange(checked_, true)) return;
  wait(arriving_[turn_]);
  if (previous_[turn_] != mine_) {
    const auto wants = [this](int peer, const Signature& call) {
      return concat(names_[peer], " wants ", to_string(call));
    };
    throw MismatchError({.what = concat(wants(rank(), mine_), ", ", wants(previous(), previous_[turn_])),
                         .likely = "ranks that do not make the same calls in the same order",
                         .next = "compare the programs and their inputs on both machines"});
  }
}

void GlooLink::finish_check() {
  check();
  wait(leaving_);
}

// ---- Transfers

void GlooLink::send(int peer, const std::byte* data, size_t bytes, Transfers& transfers, int lane) {
  if (bytes > 0) start_send(peer, data, bytes, transfers, tag_ + lane);
}

void GlooLink::receive(int peer, std::byte* data, size_t bytes, Transfers& transfers, int lane) {
  if (bytes > 0) start_receive(peer, data, bytes, transfers, tag_ + lane);
}

void GlooLink::start_send(int peer, const std::byte* data, size_t bytes, Transfers& transfers, int tag) {
  auto tensors = as_tensor(data, bytes);
  start(peer, transfers, [&] { return gloo_->send(tensors, peer, tag); });
}

void GlooLink::start_receive(int peer, std::byte* data, size_t bytes, Transfers& transfers, int tag) {
  auto tensors = as_tensor(data, bytes);
  start(peer, transfers, [&] { return gloo_->recv(tensors, peer, tag); });
}

C10dWork GlooLink::issue(int peer, const Issue& transfer) try {
  return issue_alone(transfer);
} catch (const std::exception& error) {
  const std::lock_guard lock(mutex_);
  if (closed_) std::rethrow_exception(closed_);
  throw lost(peer, error);
}

void GlooLink::start(int peer, Transfers& transfers, const Issue& transfer) {
  C10dWork work = issue(peer, transfer);
  const std::lock_guard lock(mutex_);
  if (closed_) work->abort();
  under_way_[++started_] = {peer, std::move(work)};
  transfers.push_back(started_);
}

void GlooLink::wait(Transfers& transfers) {
  for (const uint64_t number : transfers) wait_for(number);
  transfers.clear();
}

// A wait that timed out made Gloo close the connections: its peer is to blame, whatever close() was given since.
void GlooLink::wait_for(uint64_t number) {
  std::unique_lock lock(mutex_);
  const auto found = under_way_.find(number);
  if (found == under_way_.end()) std::rethrow_exception(closed_);  // forgotten, after an error
  const Transfer transfer = found->second;
  const auto timeout = options_.timeout;
  wait_ends_ = Deadline::after(timeout);
  lock.unlock();
  std::exception_ptr loss;
  try {
    if (!transfer.work->wait(timeout)) throw std::runtime_error("the connection was closed");
  } catch (const std::exception& error) {
    loss = std::make_exception_ptr(lost(transfer.peer, error));
  }
  lock.lock();
  const bool late = wait_ends_->passed();
  wait_ends_.reset();
  under_way_.erase(number);
  if (!loss) return;
  timed_out_ = timed_out_ || late;
  std::rethrow_exception(closed_ && !late ? closed_ : loss);
}

void GlooLink::forget() {
  const std::lock_guard lock(mutex_);
  under_way_.clear();
}

PeerLost GlooLink::lost(int peer, const std::exception& trouble) const {
  return lost_connection("lost " + names_[peer], options_.describe, trouble);
}

}  // namespace lockstep
