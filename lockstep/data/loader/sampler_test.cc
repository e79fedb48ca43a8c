// SPDX-License-Identifier: Apache-2.0
#include "lockstep/sampler.h"

#include <random>
#include <set>

#include "lockstep/error.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

using Order = std::vector<int64_t>;

Order global_batch(const SamplerOptions& options, int64_t epoch, int64_t step, int64_t first = 0) {
  Order batch;
  for (int rank = 0; rank < options.ranks; ++rank) {
    SamplerOptions mine = options;
    mine.rank = rank;
    DistributedSampler sampler(mine);
    sampler.set_epoch(epoch, first);
    const auto part = sampler.part(step);
    batch.insert(batch.end(), part.begin(), part.end());
  }
  return batch;
}

Order whole_epoch(const SamplerOptions& options, int64_t epoch) {
  Order order;
  for (int64_t step = 0; step < DistributedSampler(options).steps_per_epoch(); ++step)
    for (const int64_t sample : global_batch(options, epoch, step)) order.push_back(sample);
  return order;
}

TEST(DistributedSampler, gives_every_sample_once_per_epoch_for_any_sizes) {
  std::mt19937 random(7);
  for (int round = 0; round < 100; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 7);
    const SamplerOptions options{.samples = 1 + static_cast<int64_t>(random() % 200),
                                 .batch_size = ranks + static_cast<int64_t>(random() % 40),
                                 .ranks = ranks,
                                 .seed = random()};
    const Order order = whole_epoch(options, round);
    const std::set<int64_t> distinct(order.begin(), order.end());
    ASSERT_EQ(std::ssize(order), options.samples);
    ASSERT_EQ(distinct.size(), order.size());
    ASSERT_EQ(*distinct.begin(), 0);
    ASSERT_EQ(*distinct.rbegin(), options.samples - 1);
  }
}

TEST(DistributedSampler, makes_the_same_global_batches_for_any_number_of_ranks) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const SamplerOptions one{.samples = 103, .batch_size = 10, .seed = 5};
    SamplerOptions many = one;
    many.ranks = ranks;
    for (int64_t step = 0; step < 11; ++step)
      EXPECT_EQ(global_batch(one, 3, step), global_batch(many, 3, step)) << ranks << " ranks, step " << step;
  }
}

TEST(DistributedSampler, draws_a_new_order_each_epoch_and_the_same_one_for_the_same_seed) {
  const SamplerOptions options{.samples = 100, .batch_size = 10, .seed = 5};
  SamplerOptions other_seed = options;
  other_seed.seed = 6;
  EXPECT_EQ(whole_epoch(options, 0), whole_epoch(options, 0));
  EXPECT_NE(whole_epoch(options, 0), whole_epoch(options, 1));
  EXPECT_NE(whole_epoch(options, 0), whole_epoch(other_seed, 0));
}

TEST(DistributedSampler, keeps_the_order_without_shuffling) {
  const SamplerOptions options{.samples = 5, .batch_size = 2, .shuffle = false};
  EXPECT_EQ(whole_epoch(options, 4), (Order{0, 1, 2, 3, 4}));
}

TEST(DistributedSampler, cuts_a_batch_into_parts_that_differ_by_at_most_one) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    for (int64_t total = 0; total < 20; ++total) {
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_GE(even_part(total, rank, ranks).size(), total / ranks);
        EXPECT_LE(even_part(total, rank, ranks).size(), (total + ranks - 1) / ranks);
      }
    }
  }
}

TEST(DistributedSampler, refuses_a_batch_smaller_than_the_ranks) {
  const SamplerOptions options{.samples = 10, .batch_size = 3, .ranks = 4};
  const std::string message = message_of<UsageError>([&] { DistributedSampler{options}; });
  EXPECT_TRUE(contains(message, "--batch-size 3 is smaller than the number of ranks, 4"));
}

TEST(DistributedSampler, refuses_an_empty_dataset) { EXPECT_THROW(DistributedSampler({.samples = 0}), UsageError); }

TEST(DistributedSampler, resumes_at_any_sample_with_other_ranks_and_batches) {
  std::mt19937 random(11);
  for (int round = 0; round < 100; ++round) {
    const SamplerOptions before{.samples = 1 + static_cast<int64_t>(random() % 300),
                                .batch_size = 7 + static_cast<int64_t>(random() % 30),
                                .ranks = 1 + static_cast<int>(random() % 7),
                                .seed = random()};
    SamplerOptions after = before;
    after.ranks = 1 + static_cast<int>(random() % 7);
    after.batch_size = 7 + static_cast<int64_t>(random() % 30);
    const int64_t steps = DistributedSampler(before).steps_per_epoch();
    const auto stop = static_cast<int64_t>(random() % static_cast<uint64_t>(steps + 1));
    Order order;
    for (int64_t step = 0; step < stop; ++step)
      for (const int64_t sample : global_batch(before, 5, step)) order.push_back(sample);
    DistributedSampler rest(after);
    rest.set_epoch(5, static_cast<int64_t>(order.size()));
    for (int64_t step = 0; step < rest.steps(); ++step)
      for (const int64_t sample : global_batch(after, 5, step, rest.samples_before(0))) order.push_back(sample);
    ASSERT_EQ(order, whole_epoch(before, 5));
  }
}

TEST(DistributedSampler, refuses_a_position_outside_of_the_dataset) {
  DistributedSampler sampler({.samples = 10});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { sampler.set_epoch(0, 11); }), "can't continue at sample 11"));
}

}  // namespace
}  // namespace lockstep
