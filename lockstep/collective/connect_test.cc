// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/connect.h"

#include <gtest/gtest.h>

#include <thread>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/collective/rendezvous.h"
#include "lockstep/error.h"

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
  for (std::size_t rank = 0; rank < hosts.size(); ++rank)
    threads.emplace_back([&, rank] {
      c10d::TCPStore store(hosts[rank], {.port = server.getPort(), .timeout = kLongestWait});
      addresses[rank] = reachable_address(
          store, {.rank = static_cast<int>(rank), .size = 2, .describe = "a rank", .timeout = kLongestWait});
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(addresses[0], hosts[1]);
  EXPECT_EQ(addresses[1], hosts[1]);
}

}  // namespace
}  // namespace lockstep
