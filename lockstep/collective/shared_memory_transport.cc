// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shared_memory_transport.h"

#include <exception>
#include <list>
#include <mutex>
#include <numeric>
#include <optional>

#include "lockstep/base/int_vector.h"
#include "lockstep/collective/call_queue.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

class SharedMemoryTransport : public Transport {
 public:
  explicit SharedMemoryTransport(shm::Group group) : group_(std::move(group)) {}

  // In good order, unless an exception is on its way out: then the others learn at once that this rank is gone.
  ~SharedMemoryTransport() override {
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

  FuturePtr start(TensorCall call) override {
    if (is_message(call.call.operation)) return start_message(std::move(call));
    return queue_.add([this, call = std::move(call)] { group_.run(call.call); });
  }

  int run(const TensorCall& call) override {
    if (is_message(call.call.operation)) {
      queue_.hand_to_worker();
      return group_.run(call.call);
    }
    queue_.run([&] { group_.run(call.call); });
    return kAnyRank;
  }

  std::unique_ptr<Transport> group(const RankLists& lists) override {
    queue_.run_all();
    auto members = subgroup_of(group_, lists);
    return members ? make_shared_memory(std::move(*members)) : nullptr;
  }

  std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds timeout) override {
    queue_.run_all();
    auto members = separate_group_of(group_, lists, timeout);
    return members ? make_shared_memory(std::move(*members)) : nullptr;
  }

  torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) override {
    return allocate_shared(group_, sizes, options);
  }

  std::optional<shm::Group> machine_group() override {
    queue_.run_all();
    return whole_group_of(group_);
  }

  void fail(const std::string& reason) override { group_.poison(reason); }

 private:
  struct Message {
    TensorCall call;  // keeps the memory
    FuturePtr future;
  };

  FuturePtr start_message(TensorCall call) {
    queue_.hand_to_worker();
    const std::lock_guard lock(mutex_);
    std::erase_if(messages_, [](const Message& message) { return message.future->done(); });
    FuturePtr future = group_.start(call.call);
    messages_.push_back({std::move(call), future});
    return future;
  }

  // Destroyed in reverse order: first the queue, whose thread uses the group; last the tensors that the group's
  // messages use.
  std::mutex mutex_;
  std::list<Message> messages_;  // under way; guarded by mutex_
  shm::Group group_;
  CallQueue queue_;
};

constexpr std::size_t kLongestAddress = 256;

// Every rank's address, where it has one, in rank order.
IntVector<std::string> exchange_addresses(shm::Group& group, const std::string& mine) {
  if (mine.size() >= kLongestAddress)
    throw SystemError({.what = "an address of shared memory that is too long: " + mine});
  std::string padded = mine;
  padded.resize(kLongestAddress);
  std::string all(kLongestAddress * static_cast<unsigned>(group.size()), '\0');
  group.all_gather({.input = padded.data(), .output = all.data(), .count = kLongestAddress, .dtype = DType::kUInt8});
  IntVector<std::string> addresses;
  for (std::size_t i = 0; i < all.size(); i += kLongestAddress) addresses.emplace_back(all.c_str() + i);
  return addresses;
}

}  // namespace

shm::Group connect_shared_memory(const World& world, const std::vector<int>& ranks, const TransportOptions& options) {
  const shm::Options shm_options{.timeout = options.timeout, .job_ranks = ranks};
  const Deadline deadline = Deadline::after(options.timeout);
  const auto place = std::ranges::find(ranks, options.rank);
  const int size = static_cast<int>(ranks.size());
  std::optional<shm::RendezvousServer> server;
  if (place == ranks.begin()) server.emplace(size, shm_options);
  const IntVector addresses = world.exchange_texts("the address of shared memory", server ? server->address() : "");
  if (server) return server->connect(deadline);
  const std::string& address = addresses[ranks.front()];
  return shm::join_rendezvous(address, static_cast<int>(place - ranks.begin()), size, deadline, shm_options);
}

std::optional<shm::Group> subgroup_of(shm::Group& group, const RankLists& lists) {
  const auto& mine = lists[static_cast<unsigned>(group.rank())];
  const auto some = std::ranges::find_if(lists, [](const auto& list) { return !list.empty(); });
  if (some == lists.end()) return std::nullopt;
  return group.subgroup(mine.empty() ? *some : mine);  // who is in none takes part in making one
}

shm::Group whole_group_of(shm::Group& group) {
  std::vector<int> everyone(static_cast<unsigned>(group.size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return std::move(*group.subgroup(everyone));
}

std::optional<shm::Group> separate_group_of(shm::Group& group, const RankLists& lists,
                                            std::chrono::milliseconds timeout) {
  const auto& mine = lists[static_cast<unsigned>(group.rank())];
  shm::Options options{.timeout = timeout};
  for (const int member : mine) options.job_ranks.push_back(group.job_rank(member));
  const int size = static_cast<int>(mine.size());
  std::optional<shm::RendezvousServer> server;
  if (size > 1 && mine.front() == group.rank()) server.emplace(size, options);
  const auto addresses = exchange_addresses(group, server ? server->address() : "");
  if (mine.empty()) return std::nullopt;
  if (size == 1) return std::move(shm::make_thread_group(1, options).front());
  if (server) return server->connect(Deadline::after(timeout));
  const auto place = static_cast<int>(std::ranges::find(mine, group.rank()) - mine.begin());
  return shm::join_rendezvous(addresses[mine.front()], place, size, Deadline::after(timeout), options);
}

torch::Tensor allocate_shared(shm::Group& group, torch::IntArrayRef sizes, const torch::TensorOptions& options) {
  const auto bytes = static_cast<std::uint64_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  auto memory = std::make_shared<shm::Memory>(group.allocate(bytes));
  return torch::from_blob(
      memory->data(), sizes, [memory](void*) mutable { memory.reset(); }, options);
}

std::unique_ptr<Transport> make_shared_memory(shm::Group group) {
  return std::make_unique<SharedMemoryTransport>(std::move(group));
}

std::vector<std::unique_ptr<Transport>> make_shared_memory_of_threads(int ranks, std::chrono::milliseconds timeout) {
  std::vector<std::unique_ptr<Transport>> transports;
  for (shm::Group& group : shm::make_thread_group(ranks, {.timeout = timeout}))
    transports.push_back(make_shared_memory(std::move(group)));
  return transports;
}

}  // namespace lockstep
