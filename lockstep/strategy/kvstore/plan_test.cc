// SPDX-License-Identifier: Apache-2.0
// Tests without ranks: where keys lie, who may go on, what a checkpoint keeps, and what was measured.
#include <random>

#include "lockstep/strategy/kvstore/key_plan.h"
#include "lockstep/strategy/kvstore/server_table.h"
#include "lockstep/strategy/kvstore/staleness_gate.h"
#include "lockstep/strategy/kvstore/statistics.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;

std::vector<Key> keys_of(const std::vector<int64_t>& elements) {
  std::vector<Key> keys;
  for (const int64_t each : elements) keys.push_back({.elements = each, .rows = each});
  return keys;
}

TEST(KeyPlan, spreads_small_keys_and_splits_large_ones_over_all_servers) {
  const auto blocks = plan_keys(keys_of({100, 3000, 90, 10, 200}), 3, 1000);
  std::vector<int64_t> found(5);
  for (const BlockLayout& block : blocks) {
    int64_t end = 0;
    for (const KeySlice& slice : block.slices()) {
      found[slice.key] += slice.count;
      EXPECT_GE(slice.offset, end);
      EXPECT_EQ(slice.offset % 64, 0);
      end = slice.offset + slice.bytes();
      EXPECT_TRUE(slice.key != 1 || slice.count == 1000);
    }
    EXPECT_LE(end, block.bytes());
    EXPECT_GE(block.slices().size(), 2U);
  }
  EXPECT_EQ(found, (std::vector<int64_t>{100, 3000, 90, 10, 200}));
}

TEST(KeyPlan, splits_at_rows_and_gives_nothing_to_servers_without_a_row) {
  std::vector<Key> keys = keys_of({14});
  keys[0].rows = 2;
  const auto blocks = plan_keys(keys, 3, 1);
  int64_t servers = 0;
  for (const BlockLayout& block : blocks)
    for (const KeySlice& slice : block.slices()) {
      EXPECT_EQ(slice.count, 7);
      ++servers;
    }
  EXPECT_EQ(servers, 2);
}

TEST(KeyPlan, a_range_of_keys_is_one_run_of_bytes) {
  const auto blocks = plan_keys(keys_of({5, 6, 7}), 1, 1'000'000);
  const torch::Tensor block = torch::zeros({blocks[0].bytes()}, torch::kUInt8);
  blocks[0].slices()[1].in_block(block).fill_(2.0F);
  const torch::Tensor region = blocks[0].region_of(blocks[0].range_of({1, 2}), block);
  EXPECT_TRUE(torch::equal(region.view(torch::kFloat32), torch::full({6}, 2.0F)));
  EXPECT_EQ(blocks[0].region_of(blocks[0].range_of({0, 3}), block).numel(), 128 + 28);
  EXPECT_EQ(blocks[0].region_of(blocks[0].range_of({1, 1}), block).numel(), 0);
}

TEST(KeyPlan, a_large_key_is_slices_without_a_gap_that_travel_in_parts) {
  std::vector<Key> keys = keys_of({10, 0, 20});
  keys[1] = {.elements = 3001 * 700, .rows = 3001, .dtype = torch::kFloat16};
  const auto blocks = plan_keys(keys, 2, 1000);
  for (const BlockLayout& block : blocks) {
    const SliceRange range = block.range_of({1, 2});
    EXPECT_GT(range.size(), 1U);
    const auto slices = block.slices_of(range);
    for (size_t i = 1; i < slices.size(); ++i) {
      EXPECT_EQ(slices[i].offset, slices[i - 1].offset + slices[i - 1].bytes());
      EXPECT_EQ(slices[i].begin, slices[i - 1].begin + slices[i - 1].count);
    }
    const auto parts = block.parts_of(block.range_of({0, 3}));
    EXPECT_GT(parts.size(), 1U);
    EXPECT_EQ(parts.front().first, 0U);
    EXPECT_EQ(parts.back().last, block.slices().size());
    for (size_t i = 1; i < parts.size(); ++i) EXPECT_EQ(parts[i].first, parts[i - 1].last);
    EXPECT_EQ(block.parts_of({1, 1}).size(), 1U);
  }
}

// Workers that read, compute and update at random; the delays of all updates are counted independently.
class GateOfBound : public ::testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Gates, GateOfBound,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7), ::testing::Values(0, 1, 2, 5)));

TEST_P(GateOfBound, lets_no_gradient_get_older_than_the_bound_and_never_deadlocks) {
  const auto [workers, bound] = GetParam();
  StalenessGate gate(workers, bound);
  std::mt19937 random(7);
  IntVector<bool> holds(workers);
  for (int worker = 0; worker < workers; ++worker) gate.ask_to_read(worker);
  IntVector<int64_t> read_at(workers);
  int64_t updates = 0;
  int64_t oldest = 0;
  for (int round = 0; round < 20000; ++round) {
    const int worker = std::uniform_int_distribution<int>(0, workers - 1)(random);
    bool anybody = false;
    for (int each = 0; each < workers; ++each)
      anybody = anybody || (holds[each] ? gate.may_update(each) : gate.may_read(each));
    ASSERT_TRUE(anybody);
    if (holds[worker] && gate.may_update(worker)) {
      oldest = std::max(oldest, updates - read_at[worker]);
      ++updates;
      gate.update(worker);
      gate.ask_to_read(worker);
      holds[worker] = false;
    } else if (!holds[worker] && gate.may_read(worker)) {
      gate.read(worker);
      read_at[worker] = updates;
      holds[worker] = true;
    }
  }
  EXPECT_GT(updates, 1000);
  EXPECT_LE(oldest, bound);
  EXPECT_TRUE(workers <= bound + 1 || oldest == bound) << oldest;  // the bound is used up
}

TEST(StalenessGate, lets_workers_read_in_the_order_they_ask) {
  StalenessGate gate(3, 0);
  for (int worker = 0; worker < 3; ++worker) gate.ask_to_read(worker);
  for (int turn = 0; turn < 12; ++turn) {
    const int next = turn % 3;
    for (int worker = 0; worker < 3; ++worker) ASSERT_EQ(gate.may_read(worker), worker == next) << turn;
    gate.read(next);
    gate.update(next);
    gate.ask_to_read(next);
  }
}

TEST(StalenessGate, forgets_a_worker_that_left_while_waiting) {
  StalenessGate gate(3, 0);
  for (int worker = 0; worker < 3; ++worker) gate.ask_to_read(worker);
  gate.leave(0);
  EXPECT_TRUE(gate.may_read(1));
}

TEST(StalenessGate, does_not_wait_for_a_worker_that_left) {
  StalenessGate gate(2, 1);
  gate.read(0);
  gate.read(1);
  gate.update(1);
  gate.read(1);
  EXPECT_FALSE(gate.may_update(1));
  gate.leave(0);
  EXPECT_TRUE(gate.may_update(1));
}

TEST(StalenessGate, does_not_wait_for_a_gradient_that_counts_nothing) {
  StalenessGate gate(2, 0);
  gate.read(0);
  gate.ask_to_read(1);
  EXPECT_FALSE(gate.may_read(1));
  gate.drop(0);
  gate.ask_to_read(0);
  EXPECT_TRUE(gate.may_read(1));
}

TEST(StalenessGate, lets_nobody_in_while_other_servers_apply_an_update) {
  StalenessGate gate(2, 5, /*several_servers=*/true);
  gate.read(0);
  gate.update(0);
  gate.ask_to_read(1);
  EXPECT_FALSE(gate.may_update(1));
  EXPECT_FALSE(gate.may_read(1));
  gate.ask_to_read(0);  // all servers have it
  EXPECT_TRUE(gate.may_update(1));
  EXPECT_TRUE(gate.may_read(1));
}

TEST(DelayHistogram, counts_and_draws_delays) {
  DelayHistogram histogram;
  for (const int delay : {0, 0, 1, 3}) histogram.add(delay);
  EXPECT_EQ(histogram.gradients(), 4);
  EXPECT_EQ(histogram.max(), 3);
  EXPECT_DOUBLE_EQ(histogram.mean(), 1.0);
  EXPECT_TRUE(contains(histogram.text(), "delay 0                 2  ########################################\n"));
  EXPECT_TRUE(contains(histogram.text(), "delay 2                 0  \n"));
  for (int delay = 0; delay < 100; ++delay) histogram.add(delay);
  EXPECT_TRUE(contains(histogram.text(), "delay 0-6 "));
}

TEST(ServerTable, keeps_the_state_of_the_worker_that_has_pushed_most_and_gives_it_to_all) {
  const torch::NoGradGuard no_grad;
  BlockLayout layout;
  layout.add({.elements = 1, .rows = 1}, 0, 0, 1);
  const SliceRange all{0, 1};
  const auto make = [&](ServerTable& table) {
    table.create(layout, 2);
    for (const int worker : {0, 1})
      table.set_inbox(worker, torch::ones({layout.bytes() / 4}, torch::kFloat32).view(torch::kUInt8));
    table.set_optimizer({.optimizer = SGDOptions{.lr = 1, .momentum = 0.5}}, /*own_state=*/true);
  };
  const auto push = [&](ServerTable& table, int worker) {
    table.add_push(worker, all, std::array<uint8_t, 1>{1}, /*samples=*/1);
    table.merge(all, ServerTable::Workers(worker, worker + 1), {.learning_rate = 1});
    return table.states().front();
  };
  ServerTable first, second;
  make(first);
  make(second);
  push(first, 0);
  push(first, 1);
  const SliceState saved = push(first, 1);
  EXPECT_EQ(saved.state.at("step").item<float>(), 2);
  EXPECT_EQ(saved.state.at("momentum_buffer").item<float>(), 1.5);
  EXPECT_EQ(saved.value.item<float>(), -1 - 1 - 1.5);
  second.set_states({saved});
  EXPECT_EQ(push(second, 0).value.item<float>(), -3.5 - 1.75);
  EXPECT_EQ(push(second, 1).value.item<float>(), -3.5 - 1.75 - 1.75);
}

TEST(StoreStatistics, shows_batch_sizes_updates_and_delays) {
  StoreStatistics statistics{.store = "dist_async", .workers = 2};
  statistics.add_gradient(32, 2, 0);
  statistics.add_gradient(32, 1, 5);
  statistics.add_update(32);
  EXPECT_TRUE(
      contains(statistics.table(),
               "dist_async                   1-2         2                 16-32                    32           5"));
  EXPECT_TRUE(contains(statistics.table(), "delay 5"));
}

}  // namespace
}  // namespace lockstep
