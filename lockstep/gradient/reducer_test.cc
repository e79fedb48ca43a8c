#include "lockstep/gradient/reducer.h"

#include <torch/nn/modules/embedding.h>

#include <limits>

#include "lockstep/base/text.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

class ReducerOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ReducerOfSize, ::testing::Values(1, 2, 3, 4, 7));

torch::Tensor parameter(const std::vector<std::int64_t>& shape) {
  return torch::ones(shape, torch::TensorOptions().dtype(torch::kFloat64).requires_grad(true));
}

// d(value * sum(p))/dp = value: a gradient that is known.
torch::Tensor loss_with_gradient(const torch::Tensor& p, double value) { return p.sum() * value; }

// Powers of two as sample counts, so that the weighted mean is exact.
std::int64_t samples_of(int rank) { return rank == 0 ? 1 : std::int64_t{1} << (rank - 1); }

TEST_P(ReducerOfSize, gives_every_rank_the_mean_weighted_by_samples_S1) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter({3, 5});
    Reducer reducer(world, {{"p", p}});
    const torch::Tensor loss = loss_with_gradient(p, 8.0 * (world.rank() + 1));
    reducer.begin(samples_of(world.rank()), loss);
    loss.backward();
    const BatchTotals totals = reducer.finish();
    double expected = 0;
    std::int64_t samples = 0;
    for (int rank = 0; rank < world.size(); ++rank) {
      expected += 8.0 * (rank + 1) * static_cast<double>(samples_of(rank));
      samples += samples_of(rank);
    }
    EXPECT_EQ(totals.samples, samples);
    EXPECT_TRUE(torch::equal(p.grad(), torch::full({3, 5}, expected / static_cast<double>(samples), torch::kFloat64)));
    EXPECT_DOUBLE_EQ(totals.mean_loss, 15 * expected / static_cast<double>(samples));
  });
}

TEST_P(ReducerOfSize, counts_a_rank_without_samples_for_nothing_even_if_it_holds_nan) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter({4});
    Reducer reducer(world, {{"p", p}});
    const bool last_without = world.size() > 1 && world.rank() == world.size() - 1;
    if (last_without) {
      p.mutable_grad() = torch::full({4}, std::numeric_limits<double>::quiet_NaN(), torch::kFloat64);
      reducer.begin(0, {});
    } else {
      const torch::Tensor loss = loss_with_gradient(p, 3);
      reducer.begin(2, loss);
      loss.backward();
    }
    EXPECT_EQ(reducer.finish().mean_loss, 12);
    EXPECT_TRUE(torch::allclose(p.grad(), torch::full({4}, 3.0, torch::kFloat64), 1e-15, 0));
  });
}

TEST_P(ReducerOfSize, treats_a_parameter_that_some_ranks_did_not_use_as_zero_there) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor always = parameter({2});
    const torch::Tensor sometimes = parameter({2});
    const torch::Tensor never = parameter({2});
    Reducer reducer(world, {{"always", always}, {"sometimes", sometimes}, {"never", never}});
    torch::Tensor loss = loss_with_gradient(always, 1);
    if (world.rank() == 0) loss = loss + loss_with_gradient(sometimes, world.size());
    reducer.begin(1, loss);
    loss.backward();
    reducer.finish();
    EXPECT_TRUE(torch::allclose(always.grad(), torch::ones({2}, torch::kFloat64), 0, 1e-15));
    EXPECT_TRUE(torch::allclose(sometimes.grad(), torch::ones({2}, torch::kFloat64), 0, 1e-15));
    EXPECT_FALSE(never.grad().defined()) << "as on a single rank: the optimizer passes it over";
  });
}

TEST_P(ReducerOfSize, cuts_parameters_of_several_dtypes_and_layouts_into_small_buckets) {
  run_ranks(GetParam(), [](World& world) {
    std::vector<NamedTensor> parameters;
    for (int i = 0; i < 9; ++i) {
      torch::Tensor p = torch::ones({2, 3, 2, i + 1}, i % 3 == 0 ? torch::kFloat32 : torch::kFloat64);
      if (i % 2 == 0) p = p.contiguous(torch::MemoryFormat::ChannelsLast);
      parameters.push_back({concat("p", i), p.set_requires_grad(true)});
    }
    Reducer reducer(world, parameters, {.bucket_bytes = 200});
    torch::Tensor loss = torch::zeros({}, torch::kFloat64);
    const torch::Tensor factor = torch::arange(6, torch::kFloat64).reshape({2, 3, 1, 1});
    for (const auto& [name, p] : parameters) loss = loss + (p * factor).sum() * (world.rank() + 1);
    reducer.begin(1, loss);
    loss.backward();
    reducer.finish();
    const double mean_factor = (world.size() + 1) / 2.0;
    for (const auto& [name, p] : parameters) {
      EXPECT_EQ(p.grad().strides(), p.strides());
      EXPECT_TRUE(torch::allclose(p.grad(), (torch::ones_like(p) * factor * mean_factor).to(p.dtype()), 1e-6, 1e-6));
    }
  });
}

TEST_P(ReducerOfSize, takes_a_plain_backward_as_equal_weights) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter({4});
    Reducer reducer(world, {{"p", p}});
    for (int step = 0; step < 3; ++step) {
      p.mutable_grad() = torch::Tensor();
      loss_with_gradient(p, 2.0 * world.rank()).backward();
      EXPECT_TRUE(torch::allclose(p.grad(), torch::full({4}, world.size() - 1.0, torch::kFloat64), 0, 1e-14));
    }
  });
}

TEST_P(ReducerOfSize, accumulates_over_several_backwards) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter({4});
    Reducer reducer(world, {{"p", p}});
    for (int step = 1; step <= 3; ++step) {
      const torch::Tensor loss = loss_with_gradient(p, world.rank() + 1);
      reducer.begin(1, loss);
      loss.backward();
      reducer.finish();
      const double mean = (world.size() + 1) / 2.0;
      EXPECT_TRUE(torch::allclose(p.grad(), torch::full({4}, step * mean, torch::kFloat64), 1e-14, 0));
    }
  });
}

TEST(Reducer, takes_a_parameter_that_is_used_twice_once) {
  run_ranks(2, [](World& world) {
    const torch::Tensor p = parameter({2});
    Reducer reducer(world, {{"p", p}});
    const torch::Tensor loss = loss_with_gradient(p, 1) + loss_with_gradient(p * 2, 1 + world.rank());
    reducer.begin(1, loss);
    loss.backward();
    reducer.finish();
    EXPECT_TRUE(torch::equal(p.grad(), torch::full({2}, 4.0, torch::kFloat64)));
  });
}

TEST(Reducer, works_without_parameters) {
  run_ranks(2, [](World& world) {
    Reducer reducer(world, {});
    reducer.begin(world.rank() + 1, torch::full({}, 3.0));
    const BatchTotals totals = reducer.finish();
    EXPECT_EQ(totals.samples, 3);
    EXPECT_EQ(totals.mean_loss, 3);
  });
}

TEST(Reducer, refuses_a_sparse_gradient_by_name) {
  const auto run_sparse = [](World& world) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true));
    Reducer reducer(world, named_parameters(*embedding));
    embedding(torch::tensor({1, 2})).sum().backward();
  };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { run_ranks(2, run_sparse); }), "the gradient of weight is sparse"));
}

TEST(Reducer, takes_its_hooks_away) {
  run_ranks(2, [](World& world) {
    const torch::Tensor p = parameter({2});
    { const Reducer reducer(world, {{"p", p}}); }
    if (world.rank() == 0) loss_with_gradient(p, 5).backward();  // would wait for rank 1 otherwise
    EXPECT_EQ(p.grad().defined(), world.rank() == 0);
  });
}

}  // namespace
}  // namespace lockstep
