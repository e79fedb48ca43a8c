// SPDX-License-Identifier: Apache-2.0
// Each test starts its ranks in a process of its own (a "threadsafe" death test): one with threads should not fork.
#include "lockstep/spawn.h"

#include <cstdlib>
#include <iostream>

#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/stop_all.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

class Spawn : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  // Prints the message of what spawn() throws, or "nothing", and ends the process.
  [[noreturn]] static void report(int ranks, const std::function<void(World&)>& fn) {
    try {
      spawn(ranks, fn);
      std::cerr << "threw nothing" << std::endl;
    } catch (const Error& error) {
      std::cerr << error.what() << std::endl;
    }
    std::exit(0);
  }
};

void expect_sum_over(const World& world) {
  const torch::Tensor sum = torch::full({3}, world.rank() + 1);
  world.all_reduce(sum);
  if (sum[2].item<int>() != world.size() * (world.size() + 1) / 2) throw std::runtime_error("a wrong sum");
}

TEST_F(Spawn, runs_ranks_that_reach_each_other) {
  EXPECT_EXIT(report(3, expect_sum_over), ::testing::ExitedWithCode(0), "threw nothing");
}

TEST_F(Spawn, connects_them_by_rank_size_and_address) {
  const auto again = [] {
    const ReservedPort port;
    report(3, [&](World& world) {
      const World other = connect_world(2 - world.rank(), 3, concat("127.0.0.1:", port.number()));
      if (other.rank() != 2 - world.rank() || other.local_size() != 3) throw std::runtime_error("another rank");
      expect_sum_over(other);
    });
  };
  EXPECT_EXIT(again(), ::testing::ExitedWithCode(0), "threw nothing");
}

// As MPI would carry their texts; tests/hosts/launchers_test.sh has MPI and two machines.
TEST_F(Spawn, connects_them_by_what_connects_them_already) {
  const auto again = [](World& world) {
    const auto exchange = [&](const std::string& mine) { return world.exchange_texts(mine); };
    for (int time = 0; time < 2; ++time) {
      const World other = connect_world(world.rank(), 3, exchange);
      if (other.rank() != world.rank() || other.local_size() != 3) throw std::runtime_error("other neighbours");
      expect_sum_over(other);
    }
  };
  EXPECT_EXIT(report(3, again), ::testing::ExitedWithCode(0), "threw nothing");
}

TEST_F(Spawn, refuses_an_exchange_that_leaves_out_a_rank) {
  const auto one_text = [](const std::string& mine) { return std::vector<std::string>{mine}; };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { static_cast<void>(connect_world(0, 2, one_text)); }), "1 texts"));
}

TEST_F(Spawn, names_a_rank_that_throws) {
  const auto one_throws = [](World& world) {
    if (world.rank() == 1) throw std::runtime_error("on purpose");
  };
  EXPECT_EXIT(report(2, one_throws), ::testing::ExitedWithCode(0), "rank 1 of spawn.. exited with code 1");
}

TEST_F(Spawn, ends_ranks_that_wait_when_one_calls_stop) {
  const auto one_stops = [](World& world) {
    if (world.rank() == 1) return stop("enough");
    try {
      world.barrier();
    } catch (const PeerLost& error) {
      if (!contains(error.what(), "enough")) throw;
      return;
    }
    throw std::runtime_error("was not stopped");
  };
  EXPECT_EXIT(report(2, one_stops), ::testing::ExitedWithCode(0), "threw nothing");
}

TEST_F(Spawn, is_refused_in_a_rank_of_a_job) {
  const auto inside = [](World&) { spawn(2, [](World&) {}); };
  EXPECT_EXIT(report(2, inside), ::testing::ExitedWithCode(0), "spawn.. in a rank of a job");
}

TEST(ConnectWorld, refuses_bad_ranks_and_addresses) {
  EXPECT_THROW(static_cast<void>(connect_world(2, 2, "127.0.0.1:1")), UsageError);
  EXPECT_THROW(static_cast<void>(connect_world(-1, 2, "127.0.0.1:1")), UsageError);
  for (const char* address : {"", "host", "host:", ":1", "host:x", "host:0", "host:65536"})
    EXPECT_TRUE(
        contains(message_of<UsageError>([&] { static_cast<void>(connect_world(0, 2, address)); }), "HOST:PORT"));
  EXPECT_EQ(connect_world(0, 1, "127.0.0.1:1").size(), 1);
}

}  // namespace
}  // namespace lockstep
