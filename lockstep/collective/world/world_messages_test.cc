// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks, over every transport.
#include "lockstep/world.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using testing::Fabric;
using testing::kDtypes;
using testing::same;
using testing::values_of;

class Messages : public ::testing::TestWithParam<std::tuple<Fabric, int>> {
 protected:
  void run(const testing::Body& body) { testing::run_over(std::get<0>(GetParam()), std::get<1>(GetParam()), body); }
};

INSTANTIATE_TEST_SUITE_P(Worlds, Messages,
                         ::testing::Combine(::testing::Values(Fabric::kSharedMemory, Fabric::kLonelyHosts,
                                                              Fabric::kHosts),
                                            ::testing::Values(2, 4)),
                         [](const auto& test) {
                           return testing::name_of(std::get<0>(test.param)) + "_of_" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST_P(Messages, go_around_a_ring) {
  run([](World& world) {
    const int n = world.size();
    const int next = (world.rank() + 1) % n;
    const int previous = (world.rank() + n - 1) % n;
    for (const auto dtype : kDtypes)
      for (const int64_t size : {0, 1, 70001}) {
        const torch::Tensor mine = values_of(world.rank(), {size}, dtype);
        const torch::Tensor theirs = torch::zeros({size}, dtype);
        Work sent = world.send_async(mine, next);
        EXPECT_EQ(world.receive(theirs, {.from = previous}), previous);
        sent.wait();
        EXPECT_TRUE(same(theirs, values_of(previous, {size}, dtype)));
      }
  });
}

TEST_P(Messages, come_from_any_rank_and_say_from_which) {
  run([](World& world) {
    if (world.rank() > 0) return world.send(values_of(world.rank(), {3, 3}, torch::kInt32), 0, 5);
    std::set<int> sources;
    for (int i = 1; i < world.size(); ++i) {
      const torch::Tensor tensor = torch::zeros({3, 3}, torch::kInt32);
      const int source = world.receive(tensor, {.tag = 5});
      EXPECT_TRUE(same(tensor, values_of(source, {3, 3}, torch::kInt32)));
      sources.insert(source);
    }
    EXPECT_EQ(sources.size(), static_cast<unsigned>(world.size() - 1));
  });
}

TEST_P(Messages, are_told_apart_by_their_tags_and_keep_their_order) {
  run([](World& world) {
    std::vector<Work> sent;
    if (world.rank() == 0)
      for (const int number : {0, 1, 2, 3})
        sent.push_back(world.send_async(torch::full({2}, number), 1, 7 + number % 2));
    for (Work& work : sent) work.wait();
    if (world.rank() != 1) return;
    for (const int number : {1, 3, 0, 2}) {
      const torch::Tensor tensor = torch::zeros({2}, torch::kInt64);
      world.receive(tensor, {.from = 0, .tag = 7 + number % 2});
      EXPECT_TRUE(same(tensor, torch::full({2}, number)));
    }
  });
}

TEST_P(Messages, into_a_tensor_with_gaps) {
  run([](World& world) {
    if (world.rank() == 0) world.send(values_of(0, {4, 6}, torch::kFloat32).t(), 1);
    if (world.rank() != 1) return;
    const torch::Tensor whole = torch::zeros({6, 8});
    Work work = world.receive_async(whole.slice(1, 0, 8, 2));
    work.wait();
    EXPECT_EQ(work.source(), 0);
    EXPECT_TRUE(same(whole.slice(1, 0, 8, 2), values_of(0, {4, 6}, torch::kFloat32).t()));
    EXPECT_EQ(whole.slice(1, 1, 8, 2).abs().sum().item<float>(), 0);
  });
}

TEST_P(Messages, can_be_looked_at_and_waited_for_with_a_deadline) {
  run([](World& world) {
    if (world.rank() == 1) {
      const torch::Tensor tensor = torch::zeros({5});
      Work work = world.receive_async(tensor, {.from = 0});
      EXPECT_FALSE(work.done());
      EXPECT_THROW(work.wait(std::chrono::milliseconds(20)), PeerLost);
      world.barrier();  // now it is sent
      work.wait(std::chrono::seconds(20));
      EXPECT_TRUE(work.done());
      EXPECT_TRUE(same(tensor, torch::ones({5})));
    } else {
      world.barrier();
      if (world.rank() == 0) world.send(torch::ones({5}), 1);
    }
  });
}

TEST_P(Messages, that_nobody_waits_for_are_delivered) {
  run([](World& world) {
    if (world.rank() == 0)
      for (int i = 0; i < 8; ++i) static_cast<void>(world.send_async(torch::full({5000}, i), 1));
    for (int i = 0; world.rank() == 1 && i < 8; ++i) {
      const torch::Tensor tensor = torch::zeros({5000}, torch::kInt64);
      world.receive(tensor, {.from = 0});
      EXPECT_TRUE(same(tensor, torch::full({5000}, i)));
    }
    world.barrier();
  });
}

// A message that does not fit is taken and dropped; in shared memory the sender of a large one is told, too.
void send_what_does_not_fit(World& world, const torch::Tensor& sent) {
  try {
    world.send(sent, 1, 3);
  } catch (const MismatchError&) {
  }
}

TEST_P(Messages, that_do_not_fit_are_refused_and_the_next_ones_arrive) {
  run([](World& world) {
    for (const int64_t sent : {1, 1017, 1018, 1019, 70001})
      for (const int64_t expected : {2, 1016, 100003}) {
        if (world.rank() == 0) send_what_does_not_fit(world, torch::ones({sent}));
        if (world.rank() == 1) {
          const torch::Tensor tensor = torch::zeros({expected});
          const std::string message =
              testing::message_of<MismatchError>([&] { world.receive(tensor, {.from = 0, .tag = 3}); });
          EXPECT_TRUE(
              testing::contains(message, "receive of " + std::to_string(expected) + " float32 from rank 0, tag 3"));
          EXPECT_TRUE(testing::contains(message, "rank 0 wants send of " + std::to_string(sent) + " float32"));
          EXPECT_TRUE(same(tensor, torch::zeros({expected})));
        }
        if (world.rank() == 0) world.send(torch::full({70001}, 7.0F), 1, 3);
        const torch::Tensor next = torch::zeros({70001});
        if (world.rank() != 1) continue;
        world.receive(next, {.from = 0, .tag = 3});
        EXPECT_TRUE(same(next, torch::full({70001}, 7.0F)));
      }
    world.barrier();
  });
}

TEST_P(Messages, of_another_dtype_are_refused_from_any_rank_too) {
  run([](World& world) {
    for (const int64_t size : {3, 50001}) {
      if (world.rank() == 0) send_what_does_not_fit(world, torch::ones({size}, torch::kInt32));
      if (world.rank() == 1) {
        Work work = world.receive_async(torch::zeros({size}), {.tag = 3});
        const std::string message = testing::message_of<MismatchError>([&] { work.wait(std::chrono::seconds(20)); });
        EXPECT_TRUE(testing::contains(message, "send of " + std::to_string(size) + " int32"));
      }
    }
    world.barrier();
  });
}

// Large ones are under way in both directions while nobody waits for what arrives.
TEST_P(Messages, cross_each_other_and_may_be_received_in_another_order) {
  run([](World& world) {
    if (world.rank() > 1) return;
    const int peer = 1 - world.rank();
    const int64_t large = 400003;
    const torch::Tensor one = torch::zeros({large}, torch::kInt64);
    const torch::Tensor other = torch::zeros({large + 1}, torch::kInt64);
    Work second = world.receive_async(other, {.from = peer, .tag = 2});
    Work first = world.receive_async(one, {.from = peer, .tag = 1});
    world.send(values_of(world.rank(), {large}, torch::kInt64), peer, 1);
    world.send(values_of(world.rank(), {large + 1}, torch::kInt64), peer, 2);
    second.wait();
    first.wait();
    EXPECT_TRUE(same(one, values_of(peer, {large}, torch::kInt64)));
    EXPECT_TRUE(same(other, values_of(peer, {large + 1}, torch::kInt64)));
  });
}

TEST_P(Messages, of_one_tag_keep_their_order_however_many_are_under_way_in_both_directions) {
  run([](World& world) {
    if (world.rank() > 1) return;
    const int peer = 1 - world.rank();
    constexpr int kMessages = 24;
    const auto size_of = [](int i) { return i % 3 == 0 ? 12 : 40000 + 1000 * (i % 5); };
    std::vector<torch::Tensor> received;
    std::vector<Work> works;
    for (int i = 0; i < kMessages; ++i) {
      received.push_back(torch::zeros({size_of(i)}));
      works.push_back(world.receive_async(received.back(), {.from = peer}));
    }
    for (int i = 0; i < kMessages; ++i) works.push_back(world.send_async(torch::full({size_of(i)}, 1.0F * i), peer));
    for (Work& work : works) work.wait(std::chrono::seconds(30));
    for (int i = 0; i < kMessages; ++i)
      EXPECT_TRUE(same(received[static_cast<unsigned>(i)], torch::full({size_of(i)}, 1.0F * i))) << i;
  });
}

// Rank 0 keeps back a postponed all_reduce; rank 1 waits for it before it receives.
TEST_P(Messages, do_not_block_a_collective_that_was_started_before) {
  run([](World& world) {
    const torch::Tensor tensor = torch::ones({10});
    const torch::Tensor large = torch::full({300000}, 7.0F);
    Work sum = world.all_reduce_async(tensor);
    if (world.rank() == 0) world.send(large, 1);
    sum.wait();
    EXPECT_TRUE(same(tensor, torch::full({10}, static_cast<float>(world.size()))));
    if (world.rank() == 1) world.receive(torch::zeros({300000}), {.from = 0});
  });
}

}  // namespace
}  // namespace lockstep
