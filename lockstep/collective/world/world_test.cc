// SPDX-License-Identifier: Apache-2.0
#include "lockstep/world.h"

#include <atomic>
#include <set>
#include <thread>

#include "lockstep/collective/gpus.h"
#include "lockstep/deadline.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

class WorldOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, WorldOfSize, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(WorldOfSize, exchange_texts_gives_the_texts_in_rank_order) {
  run_ranks(GetParam(), [](World& world) {
    for (const std::string& word : {std::string("a"), std::string(), std::string("longer")}) {
      const auto texts = world.exchange_texts(word + std::to_string(world.rank()));
      ASSERT_EQ(texts.size(), static_cast<unsigned>(world.size()));
      for (int rank = 0; rank < world.size(); ++rank)
        EXPECT_EQ(texts[static_cast<unsigned>(rank)], word + std::to_string(rank));
    }
  });
}

TEST_P(WorldOfSize, barrier_lets_nobody_pass_before_everybody_came) {
  std::atomic<int> came{0};
  run_ranks(GetParam(), [&](World& world) {
    for (int round = 1; round <= 5; ++round) {
      ++came;
      world.barrier();
      EXPECT_GE(came.load(), round * world.size());
      world.barrier();
    }
  });
}

TEST_P(WorldOfSize, ranks_as_threads_know_who_they_are) {
  std::mutex mutex;
  std::set<int> ranks;
  run_ranks(GetParam(), [&](World& world) {
    EXPECT_EQ(world.size(), GetParam());
    EXPECT_EQ(world.local_rank(), world.rank());
    EXPECT_EQ(world.local_size(), world.size());
    EXPECT_FALSE(world.cores().empty());
    EXPECT_TRUE(world.device().is_cpu());
    const std::lock_guard lock(mutex);
    ranks.insert(world.rank());
  });
  EXPECT_EQ(ranks.size(), static_cast<unsigned>(GetParam()));
}

TEST(World, an_exception_in_one_rank_ends_the_others_and_comes_out) {
  const Stopwatch watch;
  const auto fail_in_rank_1 = [](World& world) {
    if (world.rank() == 1) throw DataError({.what = "rank 1 found a bad file"});
    torch::Tensor tensor = torch::ones({10});
    world.all_reduce(tensor);
  };
  EXPECT_TRUE(contains(message_of<DataError>([&] { run_ranks(3, fail_in_rank_1); }), "rank 1 found a bad file"));
  EXPECT_LT(watch.seconds(), 60) << "far below the world's timeout of five minutes";
}

TEST(World, a_rank_that_does_not_come_is_named_at_the_deadline) {
  const auto rank_1_stays_away = [](World& world) {
    if (world.rank() != 1) static_cast<void>(world.exchange_texts("x"));
  };
  const WorldOptions impatient{.timeout = std::chrono::milliseconds(300)};
  const std::string message = message_of<PeerLost>([&] { run_ranks(3, rank_1_stays_away, impatient); });
  EXPECT_TRUE(contains(message, "rank 1"));
}

TEST(World, gives_a_gpu_only_where_there_is_one) {
  const auto single_on_gpu = [] { return World::single({.device = torch::kCUDA}); };
  if (cuda_device_count() > 0)
    EXPECT_TRUE(single_on_gpu().device().is_cuda());
  else
    EXPECT_TRUE(contains(message_of<DeviceError>(single_on_gpu), "next:"));
}

TEST(World, refuses_a_tensor_elsewhere_on_one_rank_and_on_two) {
  for (const int ranks : {1, 2})
    run_ranks(ranks,
              [](World& world) { EXPECT_THROW(world.all_reduce(torch::empty({2}, torch::kMeta)), DeviceError); });
  EXPECT_THROW(World::single().all_reduce(torch::empty({2}, torch::kMeta)), DeviceError);
}

TEST(World, of_one_rank_gives_it_back_what_it_gave) {
  const World world = World::single();
  const torch::Tensor tensor = torch::arange(6).reshape({2, 3});
  world.all_reduce(tensor);
  world.barrier();
  EXPECT_TRUE(torch::equal(world.all_gather(tensor)[0], tensor));
  EXPECT_TRUE(torch::equal(world.reduce_scatter(tensor), tensor));
  EXPECT_TRUE(torch::equal(world.all_to_all(tensor), tensor));
  EXPECT_TRUE(torch::equal(world.all_gather_rows(tensor), tensor));
  EXPECT_EQ(world.split(0)->size(), 1);
  EXPECT_THROW(world.send(tensor, 0), UsageError);
}

TEST(World, of_one_rank_has_no_sub_world_of_no_ranks) {
  const World world = World::single();
  EXPECT_FALSE(world.group({}).has_value());
  EXPECT_FALSE(world.separate({}).has_value());
  EXPECT_FALSE(world.split(-1).has_value());
  EXPECT_EQ(world.separate({0})->size(), 1);
}

TEST(World, refuses_rows_that_no_tensor_can_have) {
  const World world = World::single();
  const torch::Tensor tensor = torch::ones({1});
  const auto refusal = [](auto&& call) { return message_of<UsageError>([&] { static_cast<void>(call()); }); };
  const std::string wrong = "give one count from 0 up for each rank, or none";
  EXPECT_TRUE(
      contains(refusal([&] { return world.all_to_all(tensor, {.send_rows = {1}, .receive_rows = {-1}}); }), wrong));
  EXPECT_TRUE(contains(refusal([&] { return world.all_to_all_async(tensor, {.send_rows = {1}}); }), wrong));
  EXPECT_TRUE(contains(refusal([&] { return world.all_to_all(tensor, {.receive_rows = {1, 1}}); }), wrong));
  EXPECT_TRUE(contains(refusal([&] { return world.all_gather_rows(tensor, {.rows = {-1}}); }), wrong));
}

TEST(World, of_one_rank_refuses_to_receive_other_rows_than_it_sends) {
  const auto exchange = [] {
    static_cast<void>(World::single().all_to_all(torch::ones({1}), {.send_rows = {1}, .receive_rows = {3}}));
  };
  EXPECT_TRUE(contains(message_of<MismatchError>(exchange), "sends 1 elements to rank 0, which expects 3"));
}

// Rank 0 sees the loss, and its thread ends, while the rank that causes it is still on its way out.
TEST(World, throws_the_cause_also_where_a_consequence_was_there_first) {
  std::atomic<bool> ended{false};
  const auto body = [&](World& world) {
    thread_local std::shared_ptr<void> at_the_end;
    if (world.rank() == 0) {
      at_the_end = std::shared_ptr<void>(nullptr, [&](void*) { ended = true; });
      world.barrier();
    }
    world.abandon("a bad file");
    while (!ended) std::this_thread::yield();
    throw DataError({.what = "the cause"});
  };
  EXPECT_TRUE(contains(message_of<DataError>([&] { run_ranks(2, body); }), "the cause"));
}

TEST(World, all_reduces_by_every_algorithm) {
  run_ranks(3, [](World& world) {
    for (const auto algorithm : {Algorithm::kDirect, Algorithm::kCentral, Algorithm::kRing, Algorithm::kTree}) {
      const torch::Tensor tensor = torch::full({1000}, world.rank() + 1.0F);
      world.all_reduce(tensor, {.algorithm = algorithm});
      EXPECT_TRUE(torch::equal(tensor, torch::full({1000}, 6.0F)));
    }
  });
}

TEST(World, names_both_sides_when_ranks_give_different_shapes) {
  const auto give_different_shapes = [](World& world) { world.all_reduce(torch::ones({10 + world.rank()})); };
  const std::string message = message_of<MismatchError>([&] { run_ranks(2, give_different_shapes); });
  EXPECT_TRUE(contains(message, "all_reduce of 10 float32"));
  EXPECT_TRUE(contains(message, "all_reduce of 11 float32"));
}

TEST(World, allocates_tensors_that_outlive_it) {
  torch::Tensor kept;
  run_ranks(2, [&](World& world) {
    const torch::Tensor tensor = world.allocate({3, 5}, torch::kFloat32).fill_(world.rank() + 1);
    world.all_reduce(tensor);
    if (world.rank() == 0) kept = tensor;
  });
  EXPECT_TRUE(torch::equal(kept, torch::full({3, 5}, 3.0F)));
}

TEST(RequireDevice, names_the_tensor_that_is_elsewhere) {
  const torch::Tensor meta = torch::empty({2}, torch::kMeta);
  const std::string message = message_of<DeviceError>([&] { require_device(meta, torch::kCPU, "fc1.weight"); });
  EXPECT_TRUE(contains(message, "fc1.weight is on meta, but cpu is needed"));
  EXPECT_NO_THROW(require_device(torch::empty({2}), torch::kCPU, "fc1.weight"));
}

}  // namespace
}  // namespace lockstep
