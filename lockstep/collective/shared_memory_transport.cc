// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shared_memory_transport.h"

#include <algorithm>
#include <array>
#include <exception>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::unique_ptr<Transport> transport_of(std::optional<shm::Group> group) {
  return group ? std::make_unique<SharedMemoryTransport>(std::move(*group)) : nullptr;
}

std::string missing_ranks(c10d::Store& store, const std::vector<std::string>& keys) try {
  std::vector<std::string> missing;
  for (std::size_t rank = 0; rank < keys.size(); ++rank)
    if (!store.check({keys[rank]})) missing.push_back(std::to_string(rank));
  return join(missing, ", ");
} catch (const std::exception&) {
  return "0, which keeps the store";
}

// Every rank's address, where it has one, in rank order.
std::vector<std::string> exchange_addresses(shm::Group& group, const std::string& mine) {
  using Padded = std::array<char, 256>;
  Padded padded{};
  if (mine.size() >= padded.size())
    throw SystemError({.what = "an address of shared memory that is too long: " + mine});
  std::ranges::copy(mine, padded.begin());
  std::vector<Padded> all(to_size(group.size()));
  group.all_gather({.input = &padded, .output = all.data(), .count = sizeof padded, .dtype = DType::kUInt8});
  std::vector<std::string> addresses;
  for (const Padded& address : all) addresses.emplace_back(address.data());
  return addresses;
}

// Connects `ranks`, none where they are no ranks; `rank` is this one. `exchange` gives the addresses of all ranks for
// this one's, which only the first of each list has.
template <class Exchange>
std::optional<shm::Group> connect_ranks(const std::vector<int>& ranks, int rank, const shm::Options& options,
                                        const Exchange& exchange) {
  const int size = static_cast<int>(ranks.size());
  std::optional<shm::RendezvousServer> server;
  if (size > 0 && ranks.front() == rank) server.emplace(size, options);
  const std::vector<std::string> addresses = exchange(server ? server->address() : "");
  if (size == 0) return std::nullopt;
  const Deadline deadline = Deadline::after(options.timeout);
  if (server) return server->connect(deadline);
  const auto place = static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
  return shm::join_rendezvous(addresses[to_size(ranks.front())], place, size, deadline, options);
}

}  // namespace

SharedMemoryTransport::~SharedMemoryTransport() {
  if (std::uncaught_exceptions() > 0) {
    group_.cancel();
    return;
  }
  try {
    queue_.drain();
    group_.leave();
  } catch (const std::exception&) {
  }
}

FuturePtr SharedMemoryTransport::start(TensorCall call) {
  if (is_message(call.call.operation)) return start_message(std::move(call));
  return queue_.add([this, call = std::move(call)] { group_.run(call.call); });
}

int SharedMemoryTransport::run(const TensorCall& call) {
  if (is_message(call.call.operation)) {
    queue_.hand_to_worker();
    forget_done();
    return group_.run(call.call);
  }
  queue_.run([&] { group_.run(call.call); });
  return kAnyRank;
}

FuturePtr SharedMemoryTransport::start_message(TensorCall call) {
  queue_.hand_to_worker();
  forget_done();
  const std::lock_guard lock(mutex_);
  FuturePtr future = group_.start(call.call);
  messages_.push_back({std::move(call), future});
  return future;
}

void SharedMemoryTransport::forget_done() {
  const std::lock_guard lock(mutex_);
  std::erase_if(messages_, [](const Message& message) { return message.future->done(); });
}

std::unique_ptr<Transport> SharedMemoryTransport::group(const RankLists& lists) {
  queue_.run_all();
  return transport_of(subgroup_of(group_, lists));
}

std::unique_ptr<Transport> SharedMemoryTransport::separate(const RankLists& lists, std::chrono::milliseconds timeout) {
  queue_.run_all();
  return transport_of(separate_group_of(group_, lists, timeout));
}

torch::Tensor SharedMemoryTransport::allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) {
  return allocate_shared(group_, sizes, options);
}

std::optional<shm::Group> SharedMemoryTransport::machine_group() {
  queue_.run_all();
  return whole_group_of(group_);
}

void SharedMemoryTransport::set_timeout(std::chrono::milliseconds timeout) {
  queue_.run([&] { group_.set_timeout(timeout); });
}

std::vector<std::string> exchange_texts(c10d::Store& store, const std::string& topic, const std::string& mine,
                                        const TransportOptions& options) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < options.size; ++rank) keys.push_back(concat("lockstep/", topic, "/", rank));
  std::vector<std::string> texts;
  try {
    store.set(keys[to_size(options.rank)], mine);
    store.wait(keys, options.timeout);
    for (const std::string& key : keys) texts.push_back(store.get_to_str(key));
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw RendezvousError(
        {.what = concat("not all ranks have come: no ", topic, " from rank ", missing_ranks(store, keys)),
         .here = options.describe,
         .likely = "that rank died, or does not make the same calls in the same order",
         .next = "look at its output"});
  }
  return texts;
}

shm::Group connect_shared_memory(c10d::Store& store, const std::vector<int>& ranks, const TransportOptions& options) {
  const shm::Options shm_options{.timeout = options.timeout, .job_ranks = ranks};
  const auto exchange = [&](const std::string& mine) { return exchange_texts(store, "address", mine, options); };
  return std::move(*connect_ranks(ranks, options.rank, shm_options, exchange));
}

std::optional<shm::Group> subgroup_of(shm::Group& group, const RankLists& lists) {
  const auto& mine = lists[to_size(group.rank())];
  const auto some = std::ranges::find_if(lists, [](const auto& list) { return !list.empty(); });
  if (some == lists.end()) return std::nullopt;
  return group.subgroup(mine.empty() ? *some : mine);  // who is in none takes part in making one
}

shm::Group whole_group_of(shm::Group& group) {
  std::vector<int> everyone(to_size(group.size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return std::move(*group.subgroup(everyone));
}

std::optional<shm::Group> separate_group_of(shm::Group& group, const RankLists& lists,
                                            std::chrono::milliseconds timeout) {
  const std::vector<int>& mine = lists[to_size(group.rank())];
  shm::Options options{.timeout = timeout};
  for (const int member : mine) options.job_ranks.push_back(group.job_rank(member));
  const auto exchange = [&](const std::string& address) { return exchange_addresses(group, address); };
  return connect_ranks(mine, group.rank(), options, exchange);
}

torch::Tensor allocate_shared(shm::Group& group, torch::IntArrayRef sizes, const torch::TensorOptions& options) {
  const auto bytes = static_cast<std::uint64_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  auto memory = std::make_shared<shm::Memory>(group.allocate(bytes));
  return torch::from_blob(
      memory->data(), sizes, [memory](void*) mutable { memory.reset(); }, options);
}

}  // namespace lockstep
