// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/transport/connect.h"

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/text.h"
#include "lockstep/collective/meet/connecting_store.h"
#include "lockstep/collective/meet/rendezvous.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "tests/support.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kLongestWait{20};

// That of the default route; a machine without one has the loopback interface only.
std::string outer_address() try { return address_towards("198.51.100.1", kLongestWait); } catch (const Error&) {
  return "127.0.0.1";
}

// Rank 0 knows the store by a loopback name, as on its own machine; rank 1 by the address that others use.
TEST(ReachableAddress, is_not_that_of_the_loopback_interface_where_another_rank_uses_a_network) {
  const c10d::TCPStore server("127.0.0.1", {.port = 0, .isServer = true, .waitWorkers = false});
  const std::vector<std::string> hosts{"127.0.0.1", outer_address()};
  std::vector<std::string> addresses(hosts.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < hosts.size(); ++rank)
    threads.emplace_back([&, rank] {
      c10d::TCPStore store(hosts[rank], {.port = server.getPort(), .timeout = kLongestWait});
      addresses[rank] = reachable_address(
          store, {.rank = static_cast<int>(rank), .size = 2, .describe = "a rank", .timeout = kLongestWait});
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(addresses[0], hosts[1]);
  EXPECT_EQ(addresses[1], hosts[1]);
}

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using testing::contains;
using testing::message_of;

// Rank r on machine r / 2.
CpuConnection connect_rank(const StorePtr& store, int rank, int size) {
  const TransportOptions options{
      .rank = rank, .size = size, .describe = concat("rank ", rank, " of ", size), .timeout = std::chrono::minutes(5)};
  return connect_cpu_ranks(store, concat("machine ", rank / 2), options);
}

void on_threads(int size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// Counts how often somebody has asked whether keys are there.
class AskedStore : public c10d::PrefixStore {
 public:
  explicit AskedStore(const StorePtr& store) : c10d::PrefixStore("asked", store) {}
  bool check(const std::vector<std::string>& keys) override {
    ++asked;
    return PrefixStore::check(keys);
  }
  std::atomic<int> asked{0};
};

TEST(ConnectingStore, waits_for_a_rank_that_comes_late_without_a_warning) {
  const auto server = c10::make_intrusive<c10d::TCPStore>(
      "127.0.0.1", c10d::TCPStoreOptions{.port = 0, .isServer = true, .waitWorkers = false});
  const auto client =
      c10::make_intrusive<c10d::TCPStore>("127.0.0.1", c10d::TCPStoreOptions{.port = server->getPort()});
  const auto asked = c10::make_intrusive<AskedStore>(client);
  ConnectingStore early(asked, 0);
  ::testing::internal::CaptureStderr();
  std::thread late([&] {
    const Deadline deadline = Deadline::after(std::chrono::minutes(1));
    while (asked->asked < 40 && !deadline.passed()) std::this_thread::yield();
    ConnectingStore(c10::make_intrusive<AskedStore>(server), 1).set("key", "value");
  });
  EXPECT_EQ(early.get("key").size(), 5U);
  late.join();
  EXPECT_GE(asked->asked, 40) << "it came before it was waited for";
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(ConnectCpuRanks, makes_several_connections_over_one_store) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int round = 0; round < 3; ++round)
    on_threads(3, [&](int rank) {
      const CpuConnection made = connect_rank(store, rank, 3);
      const torch::Tensor sum = torch::full({4}, rank + round);
      const TensorCall call =
          with_memory({.operation = Operation::kAllReduce, .count = 4, .dtype = DType::kInt64}, {sum}, {sum});
      call.begin();
      made.transport->run(call);
      call.finish();
      EXPECT_TRUE(sum.eq(3 + 3 * round).all().item<bool>()) << sum;
    });
}

void own_handler(int) {}

TEST(ConnectCpuRanks, ignores_sigpipe_between_machines_unless_the_program_handles_it) {
  const auto before = std::signal(SIGPIPE, SIG_DFL);
  const auto meet = [] {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    on_threads(3, [&](int rank) { connect_rank(store, rank, 3); });
  };
  meet();
  EXPECT_EQ(std::signal(SIGPIPE, own_handler), SIG_IGN);
  meet();
  EXPECT_EQ(std::signal(SIGPIPE, before), own_handler);
}

// A store that cannot be written any more when this rank tells its address.
class BrokenStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (contains(key, "interface")) throw UsageError({.what = "this machine has no network"});
    PrefixStore::set(key, value);
  }
};

TEST(ConnectCpuRanks, tells_all_ranks_that_one_of_them_has_failed) {
  const auto whole = c10::make_intrusive<c10d::HashStore>();
  const Stopwatch watch;
  on_threads(4, [&](int rank) {
    StorePtr store = c10::make_intrusive<c10d::PrefixStore>("job", whole);
    if (rank == 2) store = c10::make_intrusive<BrokenStore>("job", whole);
    const auto text = message_of<Error>([&] { connect_rank(store, rank, 4); });
    EXPECT_TRUE(contains(text, rank == 2 ? "no network" : "rank 2 of 4 could not connect")) << text;
  });
  EXPECT_LT(watch.seconds(), 60);  // of 300
}

}  // namespace
}  // namespace lockstep
