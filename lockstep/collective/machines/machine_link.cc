#include "lockstep/collective/machines/machine_link.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/collective/machines/gloo_connection.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Gloo keeps the order of the transfers of one tag. Users' messages may go over the same connection: not with these
// tags.
constexpr int kWatchTag = 0x7ffffffe;
int tag_of(std::uint32_t topic) {
  return static_cast<int>(0x40000000 | topic % 0x1fffffff << 1);
}  // odd: gloo_messages.cc
// Who is there takes it at once. Gloo never ends a send to one that has closed its end a moment ago.
constexpr std::chrono::seconds kLongestFarewell{1};
constexpr std::chrono::hours kAsLongAsTheLink{24 * 365};  // leaving and closing end that wait

std::vector<torch::Tensor> as_tensor(const std::byte* data, std::size_t bytes) {
  return {torch::from_blob(const_cast<std::byte*>(data), {static_cast<std::int64_t>(bytes)}, torch::kUInt8)};
}

// Gloo's words for a wait that ran into its timeout, and for what that did to all others of this rank.
bool timed_out(const std::string& trouble) { return trouble.find("Timed out waiting") != std::string::npos; }
bool ended_by_timeout_here(const std::string& trouble) {
  return trouble.find("Application timeout caused pair closure") != std::string::npos;
}

std::string first_line(const std::exception& error) { return split(error.what(), '\n').front(); }

}  // namespace

HostLink::HostLink(const c10::intrusive_ptr<c10d::Store>& store, TransportOptions options, std::string noun)
    : options_(std::move(options)), noun_(std::move(noun)), gloo_(connect_gloo(store, options_)) {}

HostLink::~HostLink() {
  if (!watcher_.joinable()) return;
  watched_->abort();
  watcher_.join();
}

void HostLink::watch(OnLoss on_loss) {
  auto tensors = as_tensor(&farewell_, 1);
  const int next = (node() + 1) % nodes();
  try {
    watched_ = issue_alone([&] { return gloo_->recv(tensors, next, kWatchTag); });
  } catch (const std::exception& error) {
    throw_lost(next, first_line(error));
  }
  watcher_ = std::thread([this, on_loss = std::move(on_loss)] { watch_next(on_loss); });
}

void HostLink::watch_next(const OnLoss& on_loss) {
  try {
    watched_->wait(kAsLongAsTheLink);
  } catch (const std::exception& error) {
    if (ended_by_timeout_here(error.what()) || is_leaving()) return;  // who waited, or close(), knows why
    const auto reason = std::make_exception_ptr(lost((node() + 1) % nodes(), first_line(error)));
    close(reason);
    on_loss(reason);
  }
}

bool HostLink::is_leaving() {
  const std::lock_guard lock(mutex_);
  return leaving_;
}

void HostLink::leave() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  const std::byte farewell{};
  auto tensors = as_tensor(&farewell, 1);
  try {
    issue_alone([&] {
      return gloo_->send(tensors, (node() + nodes() - 1) % nodes(), kWatchTag);
    })->wait(kLongestFarewell);
  } catch (const std::exception&) {  // lost, closed, or gone before
  }
}

std::vector<int> HostLink::others() const {
  std::vector<int> all;
  for (int step = 1; step < nodes(); ++step) all.push_back((node() + step) % nodes());
  return all;
}

void HostLink::send(int node, const std::byte* data, std::size_t bytes, Transfers& transfers) {
  auto tensors = as_tensor(data, bytes);
  if (bytes > 0)
    start(
        node, [&] { return gloo_->send(tensors, node, tag_of(topic_)); }, transfers);
}

void HostLink::receive(int node, std::byte* data, std::size_t bytes, Transfers& transfers) {
  auto tensors = as_tensor(data, bytes);
  if (bytes > 0)
    start(
        node, [&] { return gloo_->recv(tensors, node, tag_of(topic_)); }, transfers);
}

void HostLink::start(int node, const std::function<C10dWork()>& issue, Transfers& transfers) {
  C10dWork work;
  try {
    work = issue_alone(issue);
  } catch (const std::exception& error) {
    throw_lost(node, first_line(error));
  }
  const std::lock_guard lock(mutex_);
  if (closed_) work->abort();
  under_way_.push_back(work);
  transfers.push_back({node, std::move(work)});
}

void HostLink::wait(Transfers& transfers) {
  for (const Transfer& transfer : transfers) wait_for(transfer);
  transfers.clear();
}

void HostLink::wait_for(const Transfer& transfer) {
  bool done = false;
  std::string trouble = "the connection was closed";
  try {
    done = transfer.work->wait();
  } catch (const std::exception& error) {
    trouble = first_line(error);
  }
  {
    const std::lock_guard lock(mutex_);
    std::erase(under_way_, transfer.work);
  }
  if (timed_out(trouble)) throw lost(transfer.node, trouble);
  if (!done) throw_lost(transfer.node, trouble);
}

PeerLost HostLink::lost(int node, const std::string& trouble) const {
  return PeerLost({.what = concat("lost ", noun_, " ", node, " of ", options_.size, ": ", trouble),
                   .here = options_.describe,
                   .likely = "a rank there died, failed or stopped; the launcher there names it",
                   .next = "run again with --resume to go on from the last checkpoint"});
}

void HostLink::throw_lost(int node, const std::string& trouble) {
  const std::lock_guard lock(mutex_);
  if (closed_) std::rethrow_exception(closed_);
  throw lost(node, trouble);
}

void HostLink::forget() {
  const std::lock_guard lock(mutex_);
  under_way_.clear();
}

void HostLink::close(std::exception_ptr reason) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = std::move(reason);
  for (const auto& work : under_way_) work->abort();
  gloo_->close();
}

}  // namespace lockstep
