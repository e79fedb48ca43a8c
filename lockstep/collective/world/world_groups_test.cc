// SPDX-License-Identifier: Apache-2.0
// Sub-worlds, over every transport.
#include <random>
#include <thread>

#include "lockstep/world.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Fabric;
using testing::message_of;
using testing::same;
using testing::values_of;

class SubWorlds : public ::testing::TestWithParam<Fabric> {
 protected:
  void run(int ranks, const testing::Body& body) { testing::run_over(GetParam(), ranks, body); }
};

INSTANTIATE_TEST_SUITE_P(Worlds, SubWorlds,
                         ::testing::Values(Fabric::kSharedMemory, Fabric::kLonelyHosts, Fabric::kHosts),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(SubWorlds, have_the_ranks_in_the_order_given) {
  run(4, [](World& world) {
    const auto sub = world.group({3, 1, 0});
    ASSERT_EQ(sub.has_value(), world.rank() != 2);
    if (!sub) return;
    EXPECT_EQ(sub->size(), 3);
    const torch::Tensor ranks = sub->all_gather(torch::tensor(world.rank()));
    EXPECT_TRUE(same(ranks, torch::tensor({3, 1, 0}, torch::kInt64)));
    EXPECT_TRUE(contains(sub->describe(), "of 3"));
  });
}

TEST_P(SubWorlds, of_split_are_ordered_by_key_and_leave_out_negative_colors) {
  run(7, [](World& world) {
    const int color = world.rank() == 3 ? -1 : world.rank() % 2;
    const auto sub = world.split(color, -world.rank());
    ASSERT_EQ(sub.has_value(), world.rank() != 3);
    if (!sub) return;
    const torch::Tensor ranks = sub->all_gather(torch::tensor(world.rank()));
    EXPECT_TRUE(
        same(ranks, color == 0 ? torch::tensor({6, 4, 2, 0}, torch::kInt64) : torch::tensor({5, 1}, torch::kInt64)));
  });
}

TEST_P(SubWorlds, that_are_separate_outlive_the_loss_of_others) {
  const auto lose_rank_2 = [&] {
    run(3, [](World& world) {
      const auto pair = world.separate(world.rank() < 2 ? std::vector<int>{1, 0} : std::vector<int>());
      ASSERT_EQ(pair.has_value(), world.rank() < 2);
      if (world.rank() == 2) throw UsageError({.what = "lost on purpose"});
      EXPECT_EQ(pair->rank(), 1 - world.rank());
      EXPECT_THROW(world.barrier(), PeerLost);
      const torch::Tensor tensor = values_of(world.rank(), {1000}, torch::kFloat32);
      if (world.rank() == 0) pair->send(tensor, 0);
      if (world.rank() == 1) pair->receive(tensor, {.from = 1});
      EXPECT_TRUE(same(tensor, values_of(0, {1000}, torch::kFloat32)));
      EXPECT_TRUE(same(pair->all_gather(torch::tensor(world.rank())), torch::tensor({1, 0}, torch::kInt64)));
    });
  };
  EXPECT_TRUE(contains(message_of<UsageError>(lose_rank_2), "lost on purpose"));
}

TEST_P(SubWorlds, that_are_separate_and_abandoned_leave_their_parent_as_it_is) {
  run(2, [](World& world) {
    const auto pair = world.separate({0, 1});
    world.barrier();  // rank 0 may still connect, when rank 1 has done so
    if (world.rank() == 0) {
      EXPECT_THROW(pair->receive(torch::zeros({3}), {.from = 1}), PeerLost);
    } else {
      pair->abandon("enough");
    }
    world.barrier();
  });
}

TEST_P(SubWorlds, can_be_none_at_all_or_of_one_rank) {
  run(3, [](World& world) {
    EXPECT_FALSE(world.split(-1).has_value());
    EXPECT_FALSE(world.group({}).has_value());
    const auto alone = world.split(world.rank());
    ASSERT_TRUE(alone.has_value());
    EXPECT_EQ(alone->size(), 1);
    const torch::Tensor tensor = torch::full({3}, 2.0F);
    alone->all_reduce(tensor, ReduceOp::kMean);
    EXPECT_TRUE(same(tensor, torch::full({3}, 2.0F)));
    world.barrier();
  });
}

TEST_P(SubWorlds, of_a_sub_world_outlive_it) {
  run(4, [](World& world) {
    std::optional<World> pair;
    {
      const auto three = world.group({0, 1, 2});
      if (three) pair = three->group({0, 2});
    }
    EXPECT_EQ(pair.has_value(), world.rank() == 0 || world.rank() == 2);
    if (!pair) return;
    const torch::Tensor tensor = torch::ones({1});
    pair->all_reduce(tensor);
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

// Rank 0 of the sub-world is rank 1 of the job.
std::string what_rank_1_sees_of(const testing::Body& in_sub_world, bool separate) {
  std::string message;
  run_ranks(3, [&](World& world) {
    auto sub = separate ? world.separate({1, 2}) : world.group({1, 2});
    world.barrier();
    try {
      if (sub) in_sub_world(*sub);
    } catch (const Error& error) {
      if (world.rank() == 1) message = error.what();
    }
  });
  return message;
}

TEST(SubWorldsOfThreads, name_ranks_as_the_job_does) {
  const auto disagree = [](World& sub) { sub.all_reduce(torch::ones({10 + sub.rank()})); };
  const auto lose = [](World& sub) { sub.rank() == 1 ? sub.abandon("enough") : sub.barrier(); };
  for (const bool separate : {false, true}) {
    const std::string mismatch = what_rank_1_sees_of(disagree, separate);
    EXPECT_TRUE(contains(mismatch, "rank 1 wants all_reduce of 10 float32 (sum), rank 2 wants"));
    EXPECT_TRUE(contains(mismatch, "rank 0 of 2 (rank 1 of the job)"));
    EXPECT_TRUE(contains(what_rank_1_sees_of(lose, separate), "rank 2 failed: enough"));
  }
}

TEST_P(SubWorlds, refuse_lists_that_contradict_each_other) {
  run(3, [](World& world) {
    EXPECT_THROW(static_cast<void>(world.group({0, 0})), UsageError);
    EXPECT_THROW(static_cast<void>(world.group({3})), UsageError);
    const auto contradict = [&] {
      static_cast<void>(world.group(world.rank() == 0 ? std::vector{0, 1} : std::vector{1, 2}));
    };
    EXPECT_TRUE(
        contains(message_of<MismatchError>(contradict), "rank 0 wants a sub-world of ranks 0, 1, rank 1 one of"));
    world.barrier();
  });
}

TEST_P(SubWorlds, work_at_the_same_time_as_their_parent_from_another_thread) {
  run(4, [](World& world) {
    const auto sub = world.split(world.rank() % 2);
    std::thread beside([&] {
      for (int i = 0; i < 50; ++i) {
        const torch::Tensor tensor = torch::full({100 + i}, 2.0F);
        sub->all_reduce(tensor);
        EXPECT_TRUE(same(tensor, torch::full({100 + i}, 4.0F)));
      }
    });
    for (int i = 0; i < 50; ++i) {
      const torch::Tensor tensor = torch::full({100 + i}, 3.0F);
      world.all_reduce(tensor);
      EXPECT_TRUE(same(tensor, torch::full({100 + i}, 12.0F)));
    }
    beside.join();
  });
}

// The same random sequence on all ranks of `world`.
void make_random_calls(const World& world, unsigned seed, int calls) {
  std::mt19937 random(seed);
  const int n = world.size();
  std::vector<std::pair<Work, torch::Tensor>> under_way;
  for (int i = 0; i < calls; ++i) {
    const auto kind = random() % 6;
    const auto size = static_cast<int64_t>(random() % 3000);
    const int root = static_cast<int>(random() % static_cast<unsigned>(n));
    const torch::Tensor mine = torch::full({size}, world.rank() + 1, torch::kInt32);
    const torch::Tensor sum = torch::full({size}, n * (n + 1) / 2, torch::kInt32);
    switch (kind) {
      case 0: under_way.emplace_back(world.all_reduce_async(mine), sum); break;
      case 1:
        world.all_reduce(mine);
        EXPECT_TRUE(same(mine, sum));
        break;
      case 2:
        world.broadcast(mine, root);
        EXPECT_TRUE(same(mine, torch::full({size}, root + 1, torch::kInt32)));
        break;
      case 3: EXPECT_TRUE(same(world.all_gather(mine)[root], torch::full({size}, root + 1, torch::kInt32))); break;
      case 4: EXPECT_TRUE(same(world.reduce_scatter(mine.repeat({n})), sum)); break;
      default:
        for (auto& [work, expected] : under_way) {
          work.wait();
          EXPECT_TRUE(same(work.result(), expected));
        }
        under_way.clear();
    }
  }
  for (auto& [work, expected] : under_way) work.wait();
}

TEST_P(SubWorlds, take_random_sequences_of_calls_all_at_once) {
  const int many = testing::rounds("LOCKSTEP_RANDOM_CALLS", 60);
  run(6, [many](World& world) {
    const auto halves = world.split(world.rank() % 2);
    const auto thirds = world.split(world.rank() / 2, -world.rank());
    const auto most = world.group({5, 3, 2, 0});
    std::vector<std::thread> threads;
    threads.emplace_back([&] { make_random_calls(*halves, 1, many); });
    threads.emplace_back([&] { make_random_calls(*thirds, 2, many); });
    if (most) threads.emplace_back([&] { make_random_calls(*most, 3, many); });
    make_random_calls(world, 4, many);
    for (auto& thread : threads) thread.join();
  });
}

TEST(SubWorld, knows_its_machines) {
  testing::run_over_machines({0, 0, 1, 1, 0}, [](World& world) {
    const auto sub = world.group({3, 4, 1});
    if (!sub) return;
    EXPECT_EQ(sub->local_size(), world.rank() == 3 ? 1 : 2);
    EXPECT_EQ(sub->local_rank(), world.rank() == 1 ? 1 : 0);
    EXPECT_EQ(sub->node_rank(), world.rank() == 3 ? 1 : 0);
  });
}

}  // namespace
}  // namespace lockstep
