// SPDX-License-Identifier: Apache-2.0
#include <torch/nn/modules/embedding.h>

#include <set>

#include "lockstep/step/accumulated_batches.h"
#include "lockstep/step/exchange.h"
#include "lockstep/step/gradient_memory.h"
#include "lockstep/step/update/mean.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

class PublishedOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, PublishedOfSize, ::testing::Values(1, 2, 3, 4, 7));

constexpr int64_t kLarge = 5000;  // float64: more than what is copied when it is published

torch::Tensor parameter(int64_t size) {
  return torch::ones({size}, torch::TensorOptions().dtype(torch::kFloat64).requires_grad(true));
}

torch::Tensor sum_times(const torch::Tensor& p, double value) { return p.sum() * value; }

int64_t samples_on(int rank) { return rank == 0 ? 1 : int64_t{1} << (rank - 1); }

void backward(Exchange& gradients, const torch::Tensor& loss, int64_t samples) {
  const double factor = gradients.begin(samples, loss);
  if (samples > 0) run_backward(loss, factor);
  gradients.end();
}

// Returns the mean that an optimizer would read for the first parameter.
torch::Tensor mean_of(Exchange& gradients, const torch::Tensor& p) {
  const WeightedGradients step = gradients.begin_update({p}, {});
  std::vector<Term> terms;
  for (size_t s = 0; s < step.weights.size(); ++s) terms.push_back({step.pointers[s], step.weights[s]});
  const torch::Tensor mean = torch::empty({p.numel()}, torch::kFloat64);
  for (int64_t begin = 0; begin < p.numel(); begin += kMaxChunk)
    weighted_sum<double>(terms, torch::kFloat64, begin, std::min(kMaxChunk, p.numel() - begin),
                         mean.mutable_data_ptr<double>() + begin);
  gradients.end_update();
  return mean;
}

torch::Tensor constant(int64_t size, double value) { return torch::full({size}, value, torch::kFloat64); }

TEST_P(PublishedOfSize, gives_every_rank_the_mean_weighted_by_samples) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter(kLarge);
    const auto gradients = publish_gradients(SharedMemory::of(world), {{"p", p}});
    for (int step = 0; step < 3; ++step) {
      double expected = 0, samples = 0;
      for (int rank = 0; rank < world.size(); ++rank) {
        expected += 8.0 * (rank + 1 + step) * static_cast<double>(samples_on(rank));
        samples += static_cast<double>(samples_on(rank));
      }
      backward(*gradients, sum_times(p, 8.0 * (world.rank() + 1 + step)), samples_on(world.rank()));
      const BatchTotals totals = gradients->finish();
      EXPECT_EQ(totals.samples, static_cast<int64_t>(samples));
      EXPECT_DOUBLE_EQ(totals.mean_loss, static_cast<double>(kLarge) * expected / samples);
      EXPECT_TRUE(torch::allclose(mean_of(*gradients, p), constant(kLarge, expected / samples), 1e-14, 0));
      p.mutable_grad().reset();
    }
  });
}

TEST_P(PublishedOfSize, adds_up_several_backward_as_the_sum_of_their_means) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter(3);
    const auto gradients = publish_gradients(SharedMemory::of(world), {{"p", p}});
    // Two parts of 2 and 6 samples whose mean gradients are 4 and 8 on every rank: 2 (2 * 4 + 6 * 8) / 8.
    backward(*gradients, sum_times(p, 4), 2);
    backward(*gradients, sum_times(p, 8), 6);
    EXPECT_EQ(gradients->finish().samples, 8 * world.size());
    EXPECT_TRUE(torch::allclose(mean_of(*gradients, p), constant(3, 14), 1e-14, 0));
  });
}

TEST_P(PublishedOfSize, counts_the_first_of_several_backward_also_where_it_has_no_samples) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter(3);
    const auto gradients = publish_gradients(SharedMemory::of(world), {{"p", p}});
    const bool without = world.size() > 1 && world.rank() == world.size() - 1;
    if (without)
      backward(*gradients, {}, 0);
    else
      backward(*gradients, sum_times(p, 4), 1);
    backward(*gradients, sum_times(p, 8), 4);
    const double first = world.size() > 1 ? world.size() - 1 : 1;
    const double second = 4.0 * world.size();
    gradients->finish();
    EXPECT_TRUE(torch::allclose(mean_of(*gradients, p), constant(3, 2 * (4 * first + 8 * second) / (first + second)),
                                1e-14, 0));
  });
}

TEST_P(PublishedOfSize, forgets_gradients_that_were_dropped_without_a_step) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter(3);
    const auto gradients = publish_gradients(SharedMemory::of(world), {{"p", p}});
    backward(*gradients, sum_times(p, 100), 5);
    gradients->finish();
    p.mutable_grad().reset();
    backward(*gradients, sum_times(p, 2), 1);
    EXPECT_EQ(gradients->finish().samples, world.size());
    EXPECT_TRUE(torch::allclose(mean_of(*gradients, p), constant(3, 2), 1e-14, 0));
  });
}

TEST_P(PublishedOfSize, counts_a_rank_without_samples_for_nothing_even_if_it_holds_nan) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter(4);
    const auto gradients = publish_gradients(SharedMemory::of(world), {{"p", p}});
    const bool without = world.size() > 1 && world.rank() == world.size() - 1;
    if (without) {
      p.mutable_grad() = constant(4, std::numeric_limits<double>::quiet_NaN());
      backward(*gradients, {}, 0);
    } else {
      backward(*gradients, sum_times(p, 3), 2);
    }
    EXPECT_EQ(gradients->finish().mean_loss, 12);
    EXPECT_TRUE(torch::allclose(mean_of(*gradients, p), constant(4, 3), 1e-15, 0));
  });
}

TEST_P(PublishedOfSize, treats_a_parameter_that_some_ranks_did_not_use_as_zero_there) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor sometimes = parameter(2), never = parameter(2);
    const auto gradients = publish_gradients(SharedMemory::of(world), {{"sometimes", sometimes}, {"never", never}});
    torch::Tensor loss = torch::zeros({}, torch::TensorOptions().dtype(torch::kFloat64).requires_grad(true));
    if (world.rank() == 0) loss = loss + sum_times(sometimes, world.size());
    backward(*gradients, loss, 1);
    gradients->finish();
    for (const void* pointer : gradients->begin_update({never}, {}).pointers) EXPECT_EQ(pointer, nullptr);
    EXPECT_TRUE(torch::allclose(mean_of(*gradients, sometimes), constant(2, 1), 1e-15, 0));
  });
}

TEST(Published, takes_what_a_plain_backward_left_with_equal_weights) {
  run_ranks(2, [](World& world) {
    const torch::Tensor p = parameter(kLarge);
    const auto gradients = publish_gradients(SharedMemory::of(world), {{"p", p}});
    sum_times(p, 1.0 + world.rank()).backward();
    EXPECT_TRUE(torch::equal(mean_of(*gradients, p), constant(kLarge, 1.5)));
  });
}

TEST(Published, copies_nothing_where_autograd_writes_a_fresh_gradient) {
  run_ranks(2, [](World& world) {
    const auto memory = SharedMemory::of(world);
    const torch::Tensor large = parameter(kLarge), small = parameter(10);
    const auto gradient_memory =
        std::make_shared<GradientMemory>(memory, std::vector<NamedTensor>{{"large", large}, {"small", small}});
    {
      const GradientMemory::Scope scope(*gradient_memory);
      ((large * large).sum() + (small * small).sum()).backward();
    }
    EXPECT_TRUE(gradient_memory->place_of(large.grad()).has_value());
    EXPECT_FALSE(gradient_memory->place_of(small.grad()).has_value());
    std::set<uint64_t> places;
    for (int step = 0; step < 20; ++step) {
      large.mutable_grad().reset();
      const GradientMemory::Scope scope(*gradient_memory);
      (large * large).sum().backward();
      places.insert(gradient_memory->place_of(large.grad()).value());
    }
    EXPECT_LT(places.size(), 5U) << "memory that a gradient gave back is used again";
    memory->barrier();
  });
}

TEST_P(PublishedOfSize, copies_a_gradient_that_is_not_laid_out_as_its_parameter) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor numbers = torch::arange(1, 7, torch::kFloat64), rows = numbers.view({3, 2});
    const torch::Tensor transposed = numbers.view({2, 3}).t(), negative = torch::_neg_view(rows);
    for (const torch::Tensor& gradient : {rows, transposed, negative, rows.to(torch::kFloat32), rows.slice(0, 0, 1)}) {
      const torch::Tensor p = torch::ones({3, 2}, torch::kFloat64).requires_grad_(true);
      const auto gradients = publish_gradients(SharedMemory::of(world), {{"p", p}});
      p.mutable_grad() = gradient;
      const torch::Tensor expected = gradient.to(torch::kFloat64).expand({3, 2}).reshape({-1});
      EXPECT_TRUE(torch::allclose(mean_of(*gradients, p), expected)) << gradient;
    }
  });
}

TEST(AccumulatedBatches, add_up_losses_until_one_is_not_known) {
  AccumulatedBatches batches;
  EXPECT_EQ(batches.loss(), 0);
  batches.add(2, torch::full({}, 1.5, torch::requires_grad()));
  batches.add(3, torch::full({1}, 2.0, torch::kBFloat16));
  EXPECT_EQ(batches.loss(), 2 * 1.5 + 3 * 2.0);
  EXPECT_EQ(batches.loss_there().item<double>(), batches.loss());
  batches.add(1);
  EXPECT_TRUE(std::isnan(batches.loss()));
}

TEST(Published, exchanges_the_sparse_gradient_of_an_embedding) {
  run_ranks(2, [](World& world) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    embedding->to(torch::kFloat64);
    const auto gradients = publish_gradients(SharedMemory::of(world), {{"weight", embedding->weight}});
    backward(*gradients, embedding(torch::tensor({world.rank(), 5})).sum(), 1);
    gradients->finish();
    const torch::Tensor mean = mean_of(*gradients, embedding->weight).view({6, 2});
    EXPECT_TRUE(torch::equal(mean.sum(1), torch::tensor({1.0, 1.0, 0.0, 0.0, 0.0, 2.0}, torch::kFloat64)));
  });
}

TEST(Published, says_so_if_a_gradient_was_changed_before_the_step) {
  const torch::Tensor p = parameter(2);
  const auto gradients = publish_gradients(SharedMemory::alone(), {{"fc.weight", p}});
  backward(*gradients, sum_times(p, 1), 1);
  gradients->finish();
  p.mutable_grad().mul_(0.5);
  const std::string message = message_of<UsageError>([&] { gradients->begin_update({p}, {}); });
  EXPECT_TRUE(contains(message, "the gradient of fc.weight was changed"));
  EXPECT_TRUE(contains(message, "set_clipping"));
}

}  // namespace
}  // namespace lockstep
