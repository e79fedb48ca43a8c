// SPDX-License-Identifier: Apache-2.0
// Programs that do something with the mean gradient between backward() and step().
#include <bit>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/utils/clip_grad.h>

#include "lockstep/base/text.h"
#include "tests/step_programs.h"

namespace lockstep {
namespace {

using testing::all_sharings;
using testing::errors;
using testing::expect_refused;
using testing::numbers;
using testing::options_of;
using testing::set_numbers;
using testing::Sharing;
using testing::Trainer;

class MeanGradientsOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, MeanGradientsOfSize, ::testing::Values(1, 2, 3, 4, 7));
class MeanGradients : public testing::EachSharing {};
INSTANTIATE_TEST_SUITE_P(Sharings, MeanGradients, all_sharings(), [](const auto& info) { return name_of(info.param); });

// Gradients of parameter i on a rank: whole numbers.
torch::Tensor loss_of(const std::vector<torch::Tensor>& parameters, int rank) {
  torch::Tensor loss = torch::zeros({}, parameters[0].options().requires_grad(false));
  for (size_t i = 0; i < parameters.size(); ++i)
    loss = loss + parameters[i].sum() * static_cast<double>(420 * (rank + 1 + static_cast<int>(i)));
  return loss;
}

// Parameters of 3 elements, which are copied when they are published, and of 100,003, which are not.
struct Net : torch::nn::Module {
  explicit Net(torch::ScalarType dtype) {
    for (const int64_t size : {3, 100003})
      register_parameter(concat("of_", size), torch::ones({size}, torch::TensorOptions().dtype(dtype)));
  }
};

TEST_P(MeanGradientsOfSize, make_grad_the_exact_mean_on_every_rank) {
  for (const torch::ScalarType dtype : {torch::kFloat32, torch::kFloat64})
    run_ranks(GetParam(), [&](World& world) {
      Net net(dtype);
      SGD sgd(net.parameters(), {.lr = 1});
      DistributedDataParallel ddp(world, net, sgd);
      for (int step = 0; step < 2; ++step) {
        ddp.backward(loss_of(net.parameters(), world.rank()), 4);
        ddp.mean_gradients();
        ddp.mean_gradients();  // it is the mean already
        for (size_t i = 0; i < 2; ++i) {
          const double mean = 420 * ((world.size() + 1) / 2.0 + static_cast<double>(i));
          const torch::Tensor& grad = net.parameters()[i].grad();
          const bool is_exact = std::has_single_bit(static_cast<unsigned>(world.size()));  // 1/3 is not
          EXPECT_TRUE(torch::allclose(grad, torch::full_like(grad, mean), is_exact ? 0 : 1e-6, 0)) << dtype;
          const torch::Tensor of_all = world.all_gather(grad.slice(0, 0, 3));
          EXPECT_TRUE(torch::equal(of_all, of_all[0].expand_as(of_all)));
        }
        sgd.step();
        sgd.zero_grad();
      }
    });
}

TEST_P(MeanGradientsOfSize, leave_the_step_the_same_bits) {
  run_ranks(GetParam(), [&](World& world) {
    std::vector<torch::Tensor> results;
    for (const bool with_mean : {false, true}) {
      torch::nn::Linear net(100, 60);
      set_numbers(net->parameters());
      AdamW adam(net->parameters(), {.lr = 0.1});
      DistributedDataParallel ddp(world, *net, adam);
      for (int step = 0; step < 3; ++step) {
        const int samples = 1 + world.rank();
        ddp.backward(net->forward(numbers({samples, 100}, 10 * step + world.rank())).square().mean(), samples);
        if (with_mean) ddp.mean_gradients();
        adam.step();
        adam.zero_grad();
      }
      results.push_back(net->weight.detach().clone());
    }
    EXPECT_TRUE(torch::equal(results[0], results[1]));
  });
}

// One rank has no samples, another leaves a parameter out.
TEST(MeanGradients, come_to_ranks_that_have_no_gradient) {
  run_ranks(3, [&](World& world) {
    Net net(torch::kFloat32);
    SGD sgd(net.parameters(), {.lr = 1});
    DistributedDataParallel ddp(world, net, sgd);
    if (world.rank() == 0)
      ddp.backward({}, 0);
    else if (world.rank() == 1)
      ddp.backward(net.parameters()[1].sum() * 6, 1);
    else
      ddp.backward(loss_of(net.parameters(), 0), 1);
    ddp.mean_gradients();
    EXPECT_TRUE(torch::equal(net.parameters()[0].grad(), torch::full({3}, 210.0)));
    EXPECT_TRUE(torch::equal(net.parameters()[1].grad(), torch::full({100003}, 423.0)));
    sgd.step();
    EXPECT_TRUE(torch::equal(net.parameters()[1], torch::full({100003}, -422.0)));
  });
}

TEST(MeanGradients, of_an_embedding_with_sparse_gradients_are_dense) {
  run_ranks(2, [&](World& world) {
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel ddp(world, *net, sgd);
    ddp.backward(net->forward(torch::tensor({world.rank()})).sum() * 2, 1);
    ddp.mean_gradients();
    EXPECT_TRUE(torch::equal(net->weight.grad().sum(1), torch::tensor({2.0F, 2.0F, 0.0F, 0.0F, 0.0F})));
    sgd.step();
  });
}

// Two subsets, each clipped for itself, one of them by replacing .grad.
TEST_P(MeanGradients, can_be_clipped_as_on_one_rank) {
  const auto train = [](World& world, Sharing sharing) {
    Trainer trainer(world, sharing);
    trainer.ddp.write_parameters([&] { set_numbers(trainer.net->parameters()); });
    for (int step = 0; step < 3; ++step) {
      const torch::Tensor all = numbers({12, 3}, step);
      const torch::Tensor mine = all.chunk(world.size())[world.rank()];
      trainer.ddp.backward(trainer.net->forward(mine).square().mean(), mine.size(0));
      trainer.ddp.mean_gradients();
      const auto parameters = trainer.net->parameters();
      torch::nn::utils::clip_grad_norm_(std::vector{parameters[0], parameters[1]}, 0.05);
      torch::nn::utils::clip_grad_value_(std::vector{parameters[2]}, 0.01);
      torch::Tensor last = parameters[3];
      last.mutable_grad() = last.grad() * 0.5;
      trainer.step();
    }
    return trainer.values();
  };
  std::vector<torch::Tensor> expected;
  run_ranks(1, [&](World& world) { expected = train(world, Sharing::kSeparate); });
  run_ranks(3, [&](World& world) {
    const auto values = train(world, GetParam());
    for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(torch::allclose(values[i], expected[i], 1e-5, 1e-7)) << i;
  });
}

TEST_P(MeanGradients, of_a_plain_backward) {
  run_ranks(2, [&](World& world) {
    Trainer trainer(world, GetParam());
    for (int step = 0; step < 2; ++step) {
      (trainer.net->forward(torch::ones({4, 3})).mean() * (world.rank() == 0 ? 1 : 3)).backward();
      trainer.ddp.mean_gradients();
      EXPECT_TRUE(torch::allclose(trainer.net->parameters()[3].grad(), torch::full({2}, 1.0)));
      trainer.step();
    }
  });
}

// Every way in which a plain loss.backward() may follow a mean that no step() has used.
TEST(MeanGradients, do_not_stay_where_a_plain_backward_follows) {
  for (const bool to_none : {true, false})
    for (const bool with_second_mean : {true, false})
      run_ranks(2, [&](World& world) {
        Net net(torch::kFloat32);
        SGD sgd(net.parameters(), {.lr = 1});
        DistributedDataParallel ddp(world, net, sgd);
        const auto plain_backward = [&](double value) {
          (net.parameters()[1].sum() * (value * (world.rank() + 1)) + net.parameters()[0].sum()).backward();
        };
        plain_backward(100);
        ddp.mean_gradients();
        sgd.zero_grad(to_none);  // no step(): a loss of NaN, for instance
        plain_backward(2);
        if (with_second_mean) ddp.mean_gradients();
        sgd.step();
        EXPECT_TRUE(torch::equal(net.parameters()[1], torch::full({100003}, -2.0))) << to_none << with_second_mean;
      });
}

TEST(MeanGradients, that_one_rank_leaves_out_are_an_error_on_all) {
  expect_refused(errors(2,
                        [](World& world) {
                          Trainer trainer(world, Sharing::kShared);
                          trainer.backward();
                          if (world.rank() == 0) trainer.ddp.mean_gradients();
                          trainer.step();
                        }),
                 "the mean of the gradients");
}

TEST(MeanGradients, that_one_rank_writes_alone_are_an_error_on_all) {
  expect_refused(errors(2,
                        [](World& world) {
                          Trainer trainer(world, Sharing::kShared);
                          trainer.backward();
                          trainer.ddp.mean_gradients();
                          if (world.rank() == 1) trainer.net->parameters()[0].mutable_grad().mul_(0.5);
                          trainer.step();
                        }),
                 "gradients written by hand since backward()");
}

TEST(MeanGradients, to_which_a_backward_would_add_are_an_error) {
  expect_refused(errors(2,
                        [](World& world) {
                          Trainer trainer(world, Sharing::kShared);
                          trainer.backward();
                          trainer.ddp.mean_gradients();
                          trainer.sgd.step();
                          trainer.backward();
                        }),
                 "call zero_grad() after each step()");
}

}  // namespace
}  // namespace lockstep
