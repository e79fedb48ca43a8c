// Ranks on several machines, which here are groups of threads: shared memory inside each, Gloo between them.
#include "lockstep/collective/hierarchical_transport.h"

#include <mutex>

#include "lockstep/base/deadline.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Nodes;
using testing::run_over_hosts;
using testing::same;
using testing::values_of;

class Hosts : public ::testing::TestWithParam<Nodes> {};

std::string text_of(const Nodes& nodes) {
  std::string text;
  for (const int node : nodes) text += std::to_string(node);
  return text;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Hosts,
                         ::testing::Values(Nodes{0, 1}, Nodes{0, 0, 1}, Nodes{0, 0, 1, 1}, Nodes{0, 1, 0, 1},
                                           Nodes{0, 1, 2, 3}, Nodes{0, 1, 1, 0, 2, 1, 0}),
                         [](const auto& test) { return "ranks_on_" + text_of(test.param); });

torch::Tensor sum_of(int ranks, std::int64_t size, torch::ScalarType dtype) {
  torch::Tensor sum = torch::zeros({size}, torch::kFloat64);
  for (int rank = 0; rank < ranks; ++rank) sum += values_of(rank, {size}, dtype);
  return sum.to(dtype);
}

TEST_P(Hosts, all_reduce_exactly_in_one_shot_in_one_chunk_and_in_many) {
  run_over_hosts(GetParam(), [](World& world) {
    for (const std::int64_t size : {0, 1, 7, 4096, 4097, 100003, 1200007}) {
      const torch::Tensor tensor = values_of(world.rank(), {size}, torch::kFloat32);
      world.all_reduce(tensor);
      EXPECT_TRUE(same(tensor, sum_of(world.size(), size, torch::kFloat32))) << size;
    }
  });
}

TEST_P(Hosts, all_reduce_in_place_where_the_world_allocates) {
  run_over_hosts(GetParam(), [](World& world) {
    std::vector<torch::Tensor> tensors;
    std::vector<Work> under_way;
    for (const std::int64_t size : {300007, 5, 70001}) {
      tensors.push_back(world.allocate({size}, torch::kInt16).copy_(values_of(world.rank(), {size}, torch::kInt16)));
      under_way.push_back(world.all_reduce_async(tensors.back()));
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      under_way[i].wait();
      EXPECT_TRUE(same(tensors[i], sum_of(world.size(), tensors[i].numel(), torch::kInt16)));
    }
  });
}

// Machine by machine, and inside each rank by rank: sums that are not exact have the same bits on all ranks, every
// time.
TEST_P(Hosts, add_up_in_the_order_of_machines_and_ranks) {
  const Machines machines{GetParam()};
  const auto fractions = [](int rank, std::int64_t size) { return 1 / (torch::arange(size) + 3.0F * rank + 1.1F); };
  for (const std::int64_t size : {100, 300007}) {
    torch::Tensor expected;
    for (int node = 0; node < machines.count(); ++node) {
      torch::Tensor inside;
      for (const int rank : machines.ranks_on(node))
        inside = inside.defined() ? inside + fractions(rank, size) : fractions(rank, size);
      expected = expected.defined() ? expected + inside : inside;
    }
    run_over_hosts(GetParam(), [&](World& world) {
      const torch::Tensor tensor = fractions(world.rank(), size);
      world.all_reduce(tensor);
      EXPECT_TRUE(same(tensor, expected));
    });
  }
}

TEST_P(Hosts, broadcast_from_every_rank) {
  run_over_hosts(GetParam(), [](World& world) {
    for (int root = 0; root < world.size(); ++root)
      for (const std::int64_t size : {1, 300007}) {
        const torch::Tensor tensor = values_of(world.rank(), {size}, torch::kInt64);
        world.broadcast(tensor, root);
        EXPECT_TRUE(same(tensor, values_of(root, {size}, torch::kInt64)));
      }
  });
}

TEST_P(Hosts, have_a_group_of_their_own_on_each_machine) {
  run_over_hosts(GetParam(), [](World& world) {
    auto group = world.machine_group();
    ASSERT_TRUE(group.has_value());
    EXPECT_EQ(group->rank(), world.local_rank());
    EXPECT_EQ(group->size(), world.local_size());
    group->barrier();
    world.barrier();
  });
}

// The first failure is the victim's; the others must find out soon, wherever they are.
void expect_all_others_lose(const Nodes& nodes, int victim, const testing::Body& others) {
  std::mutex mutex;
  int lost = 0;
  double longest = 0;
  const auto body = [&](World& world) {
    const Stopwatch watch;
    try {
      world.barrier();
      if (world.rank() == victim) throw DataError({.what = "the victim ends"});
      others(world);
    } catch (const PeerLost&) {
      const std::lock_guard lock(mutex);
      ++lost;
      longest = std::max(longest, watch.seconds());
      throw;
    }
  };
  const auto run = [&] { run_over_hosts(nodes, body, {.timeout = std::chrono::seconds(60)}); };
  EXPECT_TRUE(contains(testing::message_of<DataError>(run), "the victim ends"));
  EXPECT_EQ(lost, static_cast<int>(nodes.size()) - 1);
  EXPECT_LT(longest, 10) << "far below the timeout of a minute";
}

TEST_P(Hosts, lose_a_rank_in_all_reduce_and_all_find_out) {
  for (int victim = 0; victim < static_cast<int>(GetParam().size()); ++victim)
    expect_all_others_lose(GetParam(), victim, [](World& world) {
      const torch::Tensor tensor = torch::ones({1000003});
      for (int i = 0; i < 1000; ++i) world.all_reduce(tensor);
    });
}

TEST_P(Hosts, lose_a_rank_in_a_flat_collective_and_all_find_out) {
  const int victim = static_cast<int>(GetParam().size()) - 1;
  expect_all_others_lose(GetParam(), victim, [](World& world) {
    for (int i = 0; i < 100000; ++i) static_cast<void>(world.all_gather(torch::ones({1000})));
  });
}

TEST(HostsThat, name_what_each_machine_wants_when_they_disagree) {
  std::mutex mutex;
  std::string messages;
  const auto body = [&](World& world) {
    try {
      world.all_reduce(torch::ones({world.node_rank() == 0 ? 10 : 11}));
    } catch (const MismatchError& error) {
      const std::lock_guard lock(mutex);
      messages += error.what();
      throw;
    }
  };
  const std::string first = testing::message_of<MismatchError>([&] { run_over_hosts({0, 1}, body); });
  EXPECT_TRUE(contains(first, "all_reduce of 10 float32"));
  EXPECT_TRUE(contains(first, "all_reduce of 11 float32"));
}

TEST(HostsThat, refuse_an_algorithm_by_name) {
  run_over_hosts({0, 1}, [](World& world) {
    const auto by_ring = [&] { world.all_reduce(torch::ones({1}), {.algorithm = Algorithm::kRing}); };
    EXPECT_TRUE(contains(testing::message_of<UsageError>(by_ring), "ring"));
    world.barrier();
  });
}

}  // namespace
}  // namespace lockstep
