// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/link.h"

#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/collective/machines/gloo_connection.h"

namespace lockstep {
namespace {

// Gloo keeps the order of transfers with one tag. Users' messages may share the connection: they use other tags
// (gloo_messages.cc).
constexpr int kWatchTag = 0x7ffffffe;
int gloo_tag(std::uint32_t tag) { return static_cast<int>(0x40000000 | tag % 0x1fffffff << 1); }

// A peer that is still there takes the goodbye at once; Gloo never ends a send to one that has just closed its end.
constexpr std::chrono::seconds kLongestGoodbye{1};
constexpr std::chrono::hours kAsLongAsTheLink{24 * 365};  // leave() and close() end that wait

std::vector<torch::Tensor> as_tensor(const std::byte* data, std::size_t bytes) {
  return {torch::from_blob(const_cast<std::byte*>(data), {static_cast<std::int64_t>(bytes)}, torch::kUInt8)};
}

std::string first_line(const std::exception& error) { return split(error.what(), '\n').front(); }

}  // namespace

MachineLink::MachineLink(const c10::intrusive_ptr<c10d::Store>& store, TransportOptions options, std::string noun)
    : options_(std::move(options)), noun_(std::move(noun)), gloo_(connect_gloo(store, options_)) {
  for (int step = 1; step < size(); ++step) peers_.push_back((rank() + step) % size());
}

MachineLink::~MachineLink() {
  if (!watcher_.joinable()) return;
  watched_->abort();
  watcher_.join();
}

// ---- Losses, see Note [Who watches whom]

void MachineLink::watch(OnLoss on_loss) {
  auto tensors = as_tensor(&goodbye_, 1);
  try {
    watched_ = issue_alone([&] { return gloo_->recv(tensors, next(), kWatchTag); });
  } catch (const std::exception& error) {
    throw_lost(next(), first_line(error));
  }
  watcher_ = std::thread([this, on_loss = std::move(on_loss)] { watch_next(on_loss); });
}

void MachineLink::watch_next(const OnLoss& on_loss) {
  try {
    watched_->wait(kAsLongAsTheLink);
  } catch (const std::exception& error) {
    if (failed_on_purpose()) return;
    const auto reason = std::make_exception_ptr(lost(next(), first_line(error)));
    close(reason);
    on_loss(reason);
  }
}

// This rank itself closed the connections, and whoever did knows why.
bool MachineLink::failed_on_purpose() {
  const std::lock_guard lock(mutex_);
  return leaving_ || closed_ || timed_out_ || (wait_ends_ && wait_ends_->passed());
}

void MachineLink::leave() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  const std::byte goodbye{};
  auto tensors = as_tensor(&goodbye, 1);
  const int previous = (rank() + size() - 1) % size();
  try {
    issue_alone([&] { return gloo_->send(tensors, previous, kWatchTag); })->wait(kLongestGoodbye);
  } catch (const std::exception&) {  // lost, closed, or gone before
  }
}

void MachineLink::close(std::exception_ptr reason) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = std::move(reason);
  for (const auto& [number, transfer] : under_way_) transfer.work->abort();
  gloo_->close();
}

// ---- Transfers

void MachineLink::send(int peer, const std::byte* data, std::size_t bytes, Transfers& transfers) {
  if (bytes == 0) return;
  auto tensors = as_tensor(data, bytes);
  const auto issue = [&] { return gloo_->send(tensors, peer, gloo_tag(tag_)); };
  start(peer, issue, transfers);
}

void MachineLink::receive(int peer, std::byte* data, std::size_t bytes, Transfers& transfers) {
  if (bytes == 0) return;
  auto tensors = as_tensor(data, bytes);
  const auto issue = [&] { return gloo_->recv(tensors, peer, gloo_tag(tag_)); };
  start(peer, issue, transfers);
}

void MachineLink::start(int peer, const std::function<C10dWork()>& issue, Transfers& transfers) {
  C10dWork work;
  try {
    work = issue_alone(issue);
  } catch (const std::exception& error) {
    throw_lost(peer, first_line(error));
  }
  const std::lock_guard lock(mutex_);
  if (closed_) work->abort();
  under_way_[++started_] = {peer, std::move(work)};
  transfers.push_back(started_);
}

void MachineLink::wait(Transfers& transfers) {
  for (const std::uint64_t number : transfers) wait_for(number);
  transfers.clear();
}

void MachineLink::wait_for(std::uint64_t number) {
  const Transfer transfer = begin_wait(number);
  bool done = false;
  std::string trouble = "the connection was closed";
  try {
    done = transfer.work->wait();
  } catch (const std::exception& error) {
    trouble = first_line(error);
  }
  end_wait(number, transfer.peer, done, trouble);
}

MachineLink::Transfer MachineLink::begin_wait(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto transfer = under_way_.find(number);
  if (transfer == under_way_.end()) std::rethrow_exception(closed_);  // forgotten, after an error
  wait_ends_ = Deadline::after(options_.timeout);
  return transfer->second;
}

// A wait that timed out made Gloo close the connections: its peer is to blame, whatever close() was given since.
void MachineLink::end_wait(std::uint64_t number, int peer, bool done, const std::string& trouble) {
  const std::lock_guard lock(mutex_);
  const bool late = wait_ends_->passed();
  wait_ends_.reset();
  under_way_.erase(number);
  if (done) return;
  timed_out_ = timed_out_ || late;
  if (closed_ && !late) std::rethrow_exception(closed_);
  throw lost(peer, trouble);
}

void MachineLink::forget() {
  const std::lock_guard lock(mutex_);
  under_way_.clear();
}

PeerLost MachineLink::lost(int peer, const std::string& trouble) const {
  return PeerLost({.what = concat("lost ", noun_, " ", peer, " of ", options_.size, ": ", trouble),
                   .here = options_.describe,
                   .likely = "a rank there died, failed or stopped; the launcher there names it",
                   .next = "run again with --resume to go on from the last checkpoint"});
}

void MachineLink::throw_lost(int peer, const std::string& trouble) {
  const std::lock_guard lock(mutex_);
  if (closed_) std::rethrow_exception(closed_);
  throw lost(peer, trouble);
}

}  // namespace lockstep
