// SPDX-License-Identifier: Apache-2.0

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/embedding.h>

#include <limits>

#include "lockstep/base/text.h"
#include "lockstep/step/accumulated_batches.h"
#include "lockstep/step/exchange.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

class BucketsOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, BucketsOfSize, ::testing::Values(1, 2, 3, 4, 7));

torch::Tensor parameter(const std::vector<int64_t>& shape) {
  return torch::ones(shape, torch::TensorOptions().dtype(torch::kFloat64).requires_grad(true));
}

// d(value * sum(p))/dp = value: a gradient that is known.
torch::Tensor loss_with_gradient(const torch::Tensor& p, double value) { return p.sum() * value; }

// Powers of two as sample counts, so that the weighted mean is exact.
int64_t samples_of(int rank) { return rank == 0 ? 1 : int64_t{1} << (rank - 1); }

TEST_P(BucketsOfSize, gives_every_rank_the_mean_weighted_by_samples) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter({3, 5});
    const auto reducer = exchange_in_buckets(world, {{"p", p}});
    const torch::Tensor loss = loss_with_gradient(p, 8.0 * (world.rank() + 1));
    reducer->begin(samples_of(world.rank()), loss);
    loss.backward();
    const BatchTotals totals = reducer->finish();
    double expected = 0;
    int64_t samples = 0;
    for (int rank = 0; rank < world.size(); ++rank) {
      expected += 8.0 * (rank + 1) * static_cast<double>(samples_of(rank));
      samples += samples_of(rank);
    }
    EXPECT_EQ(totals.samples, samples);
    EXPECT_TRUE(torch::equal(p.grad(), torch::full({3, 5}, expected / static_cast<double>(samples), torch::kFloat64)));
    EXPECT_DOUBLE_EQ(totals.mean_loss, 15 * expected / static_cast<double>(samples));
  });
}

TEST_P(BucketsOfSize, counts_a_rank_without_samples_for_nothing_even_if_it_holds_nan) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter({4});
    const auto reducer = exchange_in_buckets(world, {{"p", p}});
    const bool last_without = world.size() > 1 && world.rank() == world.size() - 1;
    if (last_without) {
      p.mutable_grad() = torch::full({4}, std::numeric_limits<double>::quiet_NaN(), torch::kFloat64);
      reducer->begin(0, {});
    } else {
      const torch::Tensor loss = loss_with_gradient(p, 3);
      reducer->begin(2, loss);
      loss.backward();
    }
    EXPECT_EQ(reducer->finish().mean_loss, 12);
    EXPECT_TRUE(torch::allclose(p.grad(), torch::full({4}, 3.0, torch::kFloat64), 1e-15, 0));
  });
}

TEST_P(BucketsOfSize, treats_a_parameter_that_some_ranks_did_not_use_as_zero_there) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor always = parameter({2});
    const torch::Tensor sometimes = parameter({2});
    const torch::Tensor never = parameter({2});
    const auto reducer = exchange_in_buckets(world, {{"always", always}, {"sometimes", sometimes}, {"never", never}});
    torch::Tensor loss = loss_with_gradient(always, 1);
    if (world.rank() == 0) loss = loss + loss_with_gradient(sometimes, world.size());
    reducer->begin(1, loss);
    loss.backward();
    reducer->finish();
    EXPECT_TRUE(torch::allclose(always.grad(), torch::ones({2}, torch::kFloat64), 0, 1e-15));
    EXPECT_TRUE(torch::allclose(sometimes.grad(), torch::ones({2}, torch::kFloat64), 0, 1e-15));
    EXPECT_FALSE(never.grad().defined()) << "as on a single rank: the optimizer passes it over";
  });
}

TEST_P(BucketsOfSize, cuts_parameters_of_several_dtypes_and_layouts_into_small_buckets) {
  run_ranks(GetParam(), [](World& world) {
    std::vector<NamedTensor> parameters;
    for (int i = 0; i < 9; ++i) {
      torch::Tensor p = torch::ones({2, 3, 2, i + 1}, i % 3 == 0 ? torch::kFloat32 : torch::kFloat64);
      if (i % 2 == 0) p = p.contiguous(torch::MemoryFormat::ChannelsLast);
      parameters.push_back({concat("p", i), p.set_requires_grad(true)});
    }
    const auto reducer = exchange_in_buckets(world, parameters, {.bucket_bytes = 200});
    torch::Tensor loss = torch::zeros({}, torch::kFloat64);
    const torch::Tensor factor = torch::arange(6, torch::kFloat64).reshape({2, 3, 1, 1});
    for (const auto& [name, p] : parameters) loss = loss + (p * factor).sum() * (world.rank() + 1);
    reducer->begin(1, loss);
    loss.backward();
    reducer->finish();
    const double mean_factor = (world.size() + 1) / 2.0;
    for (const auto& [name, p] : parameters) {
      EXPECT_EQ(p.grad().strides(), p.strides());
      EXPECT_TRUE(torch::allclose(p.grad(), (torch::ones_like(p) * factor * mean_factor).to(p.dtype()), 1e-6, 1e-6));
    }
  });
}

// Two gradients of 5 MiB are views of one bucket, if both fit.
TEST(Buckets, are_of_8_MiB_on_cpus_but_of_25_with_a_hook_or_of_the_size_that_was_asked_for) {
  const auto hook = sixteen_bit_hook(torch::kBFloat16);
  const std::vector<std::pair<DistributedDataParallelOptions, bool>> cases = {
      {{.gradient_as_bucket_view = true}, false},
      {{.gradient_as_bucket_view = true, .hook = hook}, true},
      {{.bucket_bytes = size_t{11} << 20, .gradient_as_bucket_view = true}, true}};
  for (const auto& [options, together] : cases)
    run_ranks(2, [&options = options, &together = together](World& world) {
      const torch::Tensor first = parameter({5 << 17}), second = parameter({5 << 17});
      const auto reducer = exchange_in_buckets(world, {{"first", first}, {"second", second}}, options);
      (loss_with_gradient(first, 1) + loss_with_gradient(second, 1)).backward();
      EXPECT_EQ(first.grad().storage().is_alias_of(second.grad().storage()), together);
    });
}

TEST_P(BucketsOfSize, takes_a_plain_backward_as_equal_weights) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter({4});
    const auto reducer = exchange_in_buckets(world, {{"p", p}});
    for (int step = 0; step < 3; ++step) {
      p.mutable_grad() = torch::Tensor();
      loss_with_gradient(p, 2.0 * world.rank()).backward();
      EXPECT_TRUE(torch::allclose(p.grad(), torch::full({4}, world.size() - 1.0, torch::kFloat64), 0, 1e-14));
    }
  });
}

TEST_P(BucketsOfSize, accumulates_over_several_backwards) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = parameter({4});
    const auto reducer = exchange_in_buckets(world, {{"p", p}});
    for (int step = 1; step <= 3; ++step) {
      const torch::Tensor loss = loss_with_gradient(p, world.rank() + 1);
      reducer->begin(1, loss);
      loss.backward();
      reducer->finish();
      const double mean = (world.size() + 1) / 2.0;
      EXPECT_TRUE(torch::allclose(p.grad(), torch::full({4}, step * mean, torch::kFloat64), 1e-14, 0));
    }
  });
}

TEST(Buckets, takes_a_parameter_that_is_used_twice_once) {
  run_ranks(2, [](World& world) {
    const torch::Tensor p = parameter({2});
    const auto reducer = exchange_in_buckets(world, {{"p", p}});
    const torch::Tensor loss = loss_with_gradient(p, 1) + loss_with_gradient(p * 2, 1 + world.rank());
    reducer->begin(1, loss);
    loss.backward();
    reducer->finish();
    EXPECT_TRUE(torch::equal(p.grad(), torch::full({2}, 4.0, torch::kFloat64)));
  });
}

TEST(Buckets, works_without_parameters) {
  run_ranks(2, [](World& world) {
    const auto reducer = exchange_in_buckets(world, {});
    reducer->begin(world.rank() + 1, torch::full({}, 3.0));
    const BatchTotals totals = reducer->finish();
    EXPECT_EQ(totals.samples, 3);
    EXPECT_EQ(totals.mean_loss, 3);
  });
}

TEST_P(BucketsOfSize, sends_the_rows_that_a_sparse_gradient_has) {
  run_ranks(GetParam(), [](World& world) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true));
    embedding->to(torch::kFloat64);
    const auto reducer = exchange_in_buckets(world, named_parameters(*embedding), {.sparse_parameters = {"weight"}});
    const torch::Tensor loss = embedding(torch::tensor({world.rank(), 9, 9})).sum() * 8.0;
    reducer->begin(samples_of(world.rank()), loss);
    loss.backward();
    const BatchTotals totals = reducer->finish();
    torch::Tensor expected = torch::zeros({10, 3}, torch::kFloat64);
    for (int rank = 0; rank < world.size(); ++rank) {
      const double weight = 8.0 * static_cast<double>(samples_of(rank)) / static_cast<double>(totals.samples);
      expected[rank] += weight;
      expected[9] += 2 * weight;
    }
    EXPECT_TRUE(embedding->weight.grad().is_sparse());
    EXPECT_TRUE(torch::equal(embedding->weight.grad().to_dense(), expected));
    EXPECT_EQ(embedding->weight.grad().coalesce()._nnz(), world.size() + 1);
  });
}

TEST(Buckets, leaves_a_sparse_gradient_undefined_if_no_rank_has_one) {
  run_ranks(2, [](World& world) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true));
    const torch::Tensor p = parameter({2});
    const auto reducer =
        exchange_in_buckets(world, {{"weight", embedding->weight}, {"p", p}}, {.sparse_parameters = {"weight"}});
    reducer->begin(1, p.sum());
    p.sum().backward();
    reducer->finish();
    EXPECT_FALSE(embedding->weight.grad().defined());
  });
}

TEST_P(BucketsOfSize, puts_gradients_where_the_bucket_is_if_told) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor p = torch::ones({2, 3, 4, 4}, torch::kFloat64)
                                .contiguous(torch::MemoryFormat::ChannelsLast)
                                .set_requires_grad(true);
    const torch::Tensor q = parameter({5});
    const auto reducer = exchange_in_buckets(world, {{"p", p}, {"q", q}}, {.gradient_as_bucket_view = true});
    std::vector<const void*> places;
    for (int step = 0; step < 4; ++step) {
      const torch::Tensor loss =
          (p * torch::arange(96, torch::kFloat64).view({2, 3, 4, 4})).sum() + loss_with_gradient(q, world.rank());
      const double factor = reducer->begin(1, loss);
      run_backward(loss, factor);
      reducer->finish();
      EXPECT_TRUE(torch::equal(p.grad(), torch::arange(96, torch::kFloat64).view({2, 3, 4, 4})));
      EXPECT_TRUE(torch::allclose(q.grad(), torch::full({5}, (world.size() - 1) / 2.0, torch::kFloat64), 1e-12));
      EXPECT_EQ(p.grad().strides(), p.strides());
      places.push_back(p.grad().const_data_ptr());
      p.mutable_grad().zero_();
      q.mutable_grad().reset();
    }
    EXPECT_EQ(places[2], places[1]) << "the first exchange settles the order of the buckets";
    EXPECT_EQ(places[3], places[1]);
  });
}

// Forgets what forward() computed and computes it again in backward(), in a backward() of its own.
struct Checkpointed : torch::autograd::Function<Checkpointed> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& w) {
    context->saved_data["x"] = x.detach();
    context->saved_data["w"] = w;
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const torch::AutoGradMode on(true);
    const torch::Tensor x = context->saved_data["x"].toTensor().detach().requires_grad_(true);
    (x * context->saved_data["w"].toTensor()).backward(gradients[0]);
    return {x.grad(), torch::Tensor()};
  }
};

torch::Tensor twice_checkpointed(const torch::Tensor& w, double x) {
  const torch::Tensor input = torch::full({4}, x, torch::kFloat64).set_requires_grad(true);
  return Checkpointed::apply(Checkpointed::apply(input, w), w).sum();  // x w^2
}

TEST(Buckets, takes_a_gradient_that_becomes_ready_twice_if_the_graph_is_static) {
  run_ranks(3, [](World& world) {
    const torch::Tensor w = parameter({4});
    const torch::Tensor other = parameter({2});
    const auto reducer =
        exchange_in_buckets(world, {{"w", w}, {"other", other}}, {.bucket_bytes = 16, .static_graph = true});
    for (int step = 0; step < 3; ++step) {
      const torch::Tensor loss = twice_checkpointed(w, world.rank()) + other.sum();
      reducer->begin(1, loss);
      loss.backward();
      reducer->finish();
      EXPECT_TRUE(torch::equal(w.grad(), torch::full({4}, 2.0, torch::kFloat64))) << step;
      EXPECT_TRUE(torch::equal(other.grad(), torch::ones({2}, torch::kFloat64))) << step;
      w.mutable_grad().reset();
      other.mutable_grad().reset();
    }
  });
}

TEST(Buckets, says_so_if_a_gradient_becomes_ready_twice) {
  const auto run_checkpointed = [](World& world) {
    const torch::Tensor w = parameter({4});
    const auto reducer = exchange_in_buckets(world, {{"w", w}});
    reducer->begin(1, twice_checkpointed(w, 1));
    twice_checkpointed(w, 1).backward();
    reducer->finish();
  };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { run_ranks(2, run_checkpointed); }), "w became ready again"));
}

TEST_P(BucketsOfSize, takes_branches_that_change_from_step_to_step) {
  run_ranks(GetParam(), [](World& world) {
    const std::vector<NamedTensor> branches = {{"0", parameter({3})}, {"1", parameter({4})}, {"2", parameter({5})}};
    const auto reducer = exchange_in_buckets(world, branches, {.bucket_bytes = 8});
    for (int step = 0; step < 5; ++step) {
      const auto branch_of = [&](int rank) -> size_t { return (rank + step) % 3; };
      const torch::Tensor loss = loss_with_gradient(branches[branch_of(world.rank())].tensor, 6);
      reducer->begin(1, loss);
      loss.backward();
      reducer->finish();
      for (size_t i = 0; i < branches.size(); ++i) {
        double ranks = 0;
        for (int rank = 0; rank < world.size(); ++rank) ranks += branch_of(rank) == i ? 1 : 0;
        torch::Tensor& gradient = torch::Tensor(branches[i].tensor).mutable_grad();
        EXPECT_EQ(gradient.defined(), ranks > 0);
        const double value = gradient.defined() ? gradient[0].item<double>() : 0;
        EXPECT_NEAR(value, 6 * ranks / world.size(), 1e-12);
        gradient.reset();
      }
    }
  });
}

TEST_P(BucketsOfSize, takes_a_loss_that_is_itself_a_parameter_after_a_step_that_left_one_out) {
  run_ranks(GetParam(), [](World& world) {
    const torch::Tensor scalar = parameter({}), other = parameter({2});
    const auto buckets = exchange_in_buckets(world, {{"scalar", scalar}, {"other", other}});
    for (const torch::Tensor& loss : {scalar * 1, scalar}) {
      scalar.mutable_grad() = torch::Tensor();
      buckets->begin(1, loss);
      loss.backward();
      buckets->finish();
      EXPECT_EQ(scalar.grad().item<double>(), 1);
      EXPECT_FALSE(other.grad().defined());
    }
  });
}

TEST(Buckets, refuses_a_sparse_gradient_by_name) {
  const auto run_sparse = [](World& world) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true));
    const auto reducer = exchange_in_buckets(world, named_parameters(*embedding));
    embedding(torch::tensor({1, 2})).sum().backward();
  };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { run_ranks(2, run_sparse); }), "the gradient of weight is sparse"));
}

TEST(Buckets, takes_its_hooks_away) {
  run_ranks(2, [](World& world) {
    const torch::Tensor p = parameter({2});
    { const auto reducer = exchange_in_buckets(world, {{"p", p}}); }
    if (world.rank() == 0) loss_with_gradient(p, 5).backward();  // would wait for rank 1 otherwise
    EXPECT_EQ(p.grad().defined(), world.rank() == 0);
  });
}

}  // namespace
}  // namespace lockstep
