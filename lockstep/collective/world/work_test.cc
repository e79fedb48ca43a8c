// SPDX-License-Identifier: Apache-2.0
// The rules of a Work, over every transport.
#include "lockstep/deadline.h"
#include "lockstep/world.h"
#include "tests/support.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::Fabric;
using testing::same;

class WorkOf : public ::testing::TestWithParam<Fabric> {
 protected:
  void run(int ranks, const testing::Body& body) { testing::run_over(GetParam(), ranks, body); }
};

INSTANTIATE_TEST_SUITE_P(Worlds, WorkOf, ::testing::Values(Fabric::kSharedMemory, Fabric::kLonelyHosts, Fabric::kHosts),
                         [](const auto& test) { return testing::name_of(test.param); });

torch::Tensor ones(float value) { return torch::full({1000}, value); }

TEST_P(WorkOf, an_all_reduce_can_be_waited_for_out_of_order) {
  run(3, [](World& world) {
    std::vector<torch::Tensor> tensors;
    std::vector<Work> under_way;
    for (int i = 0; i < 8; ++i) {
      tensors.push_back(ones(static_cast<float>(i)));
      under_way.push_back(world.all_reduce_async(tensors.back()));
    }
    const int first = world.rank() * 2 + 1;  // another one on each rank
    for (int i = 0; i < 8; ++i) {
      const auto which = static_cast<unsigned>((first + 3 * i) % 8);
      under_way[which].wait();
      EXPECT_TRUE(same(tensors[which], ones(3 * static_cast<float>(which))));
    }
  });
}

TEST_P(WorkOf, different_collectives_can_be_waited_for_out_of_order) {
  run(3, [](World& world) {
    const torch::Tensor tensor = ones(static_cast<float>(world.rank()));
    const torch::Tensor other = ones(static_cast<float>(world.rank()));
    Work sum = world.all_reduce_async(tensor);
    Work whole = world.all_gather_async(torch::full({2}, world.rank()));
    Work part = world.reduce_scatter_async(torch::ones({6}));
    Work moved = world.all_to_all_async(torch::full({3}, world.rank()));
    Work root = world.broadcast_async(other, 1);
    for (Work* const work : {&root, &moved, &part, &whole, &sum}) work->wait();
    EXPECT_TRUE(same(sum.result(), ones(3)));
    EXPECT_TRUE(same(whole.result(), torch::arange(3).unsqueeze(1).repeat({1, 2})));
    EXPECT_TRUE(same(part.result(), torch::full({2}, 3.0F)));
    EXPECT_TRUE(same(moved.result(), torch::arange(3)));
    EXPECT_TRUE(same(root.result(), ones(1)));
  });
}

TEST_P(WorkOf, a_call_that_was_dropped_is_made_all_the_same) {
  run(2, [](World& world) {
    const torch::Tensor tensor = ones(1);
    if (world.rank() == 0) {
      static_cast<void>(world.all_reduce_async(tensor));
    } else {
      world.all_reduce(tensor);
    }
    world.barrier();
    EXPECT_TRUE(same(tensor, ones(2)));
  });
}

TEST_P(WorkOf, calls_under_way_come_before_a_blocking_one) {
  run(2, [](World& world) {
    const torch::Tensor tensor = ones(1);
    Work first = world.all_reduce_async(tensor);
    if (world.rank() == 0) first.wait();  // both orders are right
    world.barrier();
    if (world.rank() == 1) first.wait();
    EXPECT_TRUE(same(tensor, ones(2)));
  });
}

TEST_P(WorkOf, a_wait_that_ends_at_its_deadline_leaves_the_call_going_on) {
  run(2, [](World& world) {
    const torch::Tensor tensor = ones(1);
    const torch::Tensor go = torch::zeros({1});
    if (world.rank() == 0) {
      Work work = world.all_reduce_async(tensor);
      const Stopwatch watch;
      EXPECT_THROW(work.wait(milliseconds(30)), PeerLost);
      EXPECT_LT(watch.seconds(), testing::kAtOnce);
      EXPECT_FALSE(work.done());
      world.send(go, 1);
      work.wait(std::chrono::seconds(20));
    } else {
      world.receive(go, {.from = 0});
      world.all_reduce(tensor);
    }
    EXPECT_TRUE(same(tensor, ones(2)));
    world.barrier();
  });
}

TEST_P(WorkOf, done_makes_progress_without_a_wait) {
  run(2, [](World& world) {
    const torch::Tensor tensor = ones(1);
    Work work = world.all_reduce_async(tensor);
    const Deadline deadline = Deadline::after(std::chrono::seconds(20));
    while (!work.done()) ASSERT_FALSE(deadline.passed());
    work.wait();
    EXPECT_TRUE(same(tensor, ones(2)));
  });
}

TEST_P(WorkOf, result_is_there_only_after_the_wait) {
  run(2, [](World& world) {
    Work work = world.all_gather_async(torch::full({2}, world.rank()));
    EXPECT_THROW(static_cast<void>(work.result()), UsageError);
    Work copy = work;
    copy.wait();
    EXPECT_TRUE(same(work.result(), torch::tensor({{0, 0}, {1, 1}}, torch::kInt64)));
  });
}

TEST_P(WorkOf, a_world_that_is_gone_still_ends_when_it_is_waited_for) {
  run(2, [](World& world) {
    const torch::Tensor tensor = ones(1);
    std::optional<Work> work;
    {
      const auto sub = world.group({0, 1});
      work.emplace(sub->all_reduce_async(tensor));
    }
    work->wait();
    EXPECT_TRUE(same(tensor, ones(2)));
  });
}

TEST(Work, throws_its_own_mismatch_and_leaves_the_next_call_alone) {
  run_ranks(2, [](World& world) {
    const torch::Tensor tensor = ones(1);
    Work bad = world.all_reduce_async(torch::ones({3 + world.rank()}));
    Work good = world.all_reduce_async(tensor);
    good.wait();
    EXPECT_TRUE(same(tensor, ones(2)));
    EXPECT_THROW(bad.wait(), MismatchError);
    EXPECT_THROW(bad.wait(), MismatchError) << "each time";
  });
}

TEST(Work, of_a_peer_that_left_without_it_is_lost) {
  std::atomic<int> lost{0};
  const auto rank_0_forgets = [&](World& world) {
    Work work = world.all_reduce_async(ones(1));
    if (world.rank() == 0) return;
    EXPECT_THROW(work.wait(), PeerLost);
    ++lost;
  };
  run_ranks(2, rank_0_forgets);
  EXPECT_EQ(lost, 1);
}

}  // namespace
}  // namespace lockstep
