// SPDX-License-Identifier: Apache-2.0
#include "lockstep/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/random.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

using Order = std::vector<int64_t>;

Order drawn(const SampleOrder& order, uint64_t seed, int64_t epoch) {
  Order places(to_size(order.samples));
  order.draw(seed, epoch)(0, places);
  return places;
}

Order sorted(Order order) {
  std::sort(order.begin(), order.end());
  return order;
}

Order all_of(int64_t samples) {
  Order order(to_size(samples));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

TEST(Permuted, is_a_permutation_of_any_size) {
  for (uint64_t count = 1; count < 200; ++count) {
    Order places;
    for (uint64_t i = 0; i < count; ++i) places.push_back(static_cast<int64_t>(permuted(i, count, count * 7)));
    ASSERT_EQ(sorted(places), all_of(static_cast<int64_t>(count)));
  }
}

TEST(Permuted, puts_every_sample_in_every_place) {
  constexpr int kCount = 6;
  constexpr int kKeys = 6000;
  int seen[kCount][kCount] = {};
  for (int key = 0; key < kKeys; ++key)
    for (uint64_t i = 0; i < kCount; ++i) ++seen[i][permuted(i, kCount, mix_seed(3, key))];
  for (const auto& row : seen)
    for (const int count : row) EXPECT_NEAR(count, kKeys / kCount, 5 * std::sqrt(kKeys / kCount));
}

TEST(WindowOrder, visits_every_sample_once_and_stays_within_windows_of_a_shard_order) {
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    std::vector<int64_t> sizes(1 + random() % 9);
    for (auto& size : sizes) size = static_cast<int64_t>(random() % 40);
    sizes[0] += 1;
    const auto window = 1 + static_cast<int64_t>(random() % 50);
    const auto order = window_order(sizes, window);
    const Order places = drawn(*order, random(), round);
    ASSERT_EQ(sorted(places), all_of(order->samples));
  }
}

TEST(WindowOrder, reads_long_runs) {
  // With windows as long as a shard, every window is one shard.
  const auto order = window_order({100, 100, 100, 100}, 100);
  const Order places = drawn(*order, 5, 0);
  for (size_t window = 0; window < 4; ++window) {
    const auto begin = places.begin() + static_cast<ptrdiff_t>(window * 100);
    const auto [low, high] = std::minmax_element(begin, begin + 100);
    EXPECT_EQ(*high - *low, 99);
  }
  EXPECT_NE(places, all_of(400));
}

TEST(SampleOrders, depend_on_seed_and_epoch_only_and_can_be_read_from_any_place) {
  const std::vector<std::shared_ptr<const SampleOrder>> orders = {random_order(97), window_order({40, 50, 7}, 30),
                                                                  weighted_order({1, 2, 3, 4}, 97)};
  for (const auto& order : orders) {
    const Order whole = drawn(*order, 1, 2);
    EXPECT_EQ(whole, drawn(*order, 1, 2));
    EXPECT_NE(whole, drawn(*order, 1, 3));
    EXPECT_NE(whole, drawn(*order, 2, 2));
    Order part(20);
    order->draw(1, 2)(60, part);
    EXPECT_EQ(part, Order(whole.begin() + 60, whole.begin() + 80));
  }
}

TEST(WeightedOrder, draws_samples_in_proportion_to_their_weights) {
  constexpr int64_t kDraws = 100000;
  const Order places = drawn(*weighted_order({1, 0, 3, 6}, kDraws), 9, 0);
  const auto share = [&](int64_t sample) {
    return static_cast<double>(std::count(places.begin(), places.end(), sample)) / kDraws;
  };
  EXPECT_NEAR(share(0), 0.1, 0.01);
  EXPECT_EQ(share(1), 0);
  EXPECT_NEAR(share(2), 0.3, 0.01);
  EXPECT_NEAR(share(3), 0.6, 0.01);
}

TEST(WeightedOrder, refuses_negative_and_all_zero_weights) {
  EXPECT_TRUE(contains(message_of<UsageError>([] { weighted_order({1, -1}, 4); }), "the weight of sample 1 is -1"));
  EXPECT_TRUE(contains(message_of<UsageError>([] { weighted_order({0, 0}, 4); }), "add up to 0"));
}

}  // namespace
}  // namespace lockstep
