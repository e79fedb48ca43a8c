// SPDX-License-Identifier: Apache-2.0
// Programs that would train on wrong numbers if a step did not notice: each must end with an error on every rank that
// names the cause, or give what one rank gives.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <mutex>

#include "lockstep/base/int_vector.h"
#include "lockstep/ddp.h"
#include "lockstep/gradient_scaler.h"
#include "lockstep/optimizers.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;

// How the gradients get from rank to rank, and whether the ranks share one copy of the parameters.
enum class Sharing { kShared, kSharedThroughBuckets, kSeparate };

std::string name_of(Sharing sharing) {
  const std::vector<std::string> names{"shared", "shared_through_buckets", "separate"};
  return names[static_cast<std::size_t>(sharing)];
}

DistributedDataParallelOptions options_of(Sharing sharing) {
  return {.share_parameters = sharing != Sharing::kSeparate, .mean_in_grad = sharing == Sharing::kSharedThroughBuckets};
}

// One rank's model, optimizer and DistributedDataParallel. The loss is the mean of the outputs, for inputs of ones.
struct Trainer {
  Trainer(World& all, Sharing sharing, const SGDOptions& options = {.lr = 0.1})
      : world(all), sgd(net->parameters(), options), ddp(world, *net, sgd, options_of(sharing)) {}

  void backward(int samples = 4) {
    if (samples == 0) return ddp.backward({}, 0);
    ddp.backward(net->forward(torch::ones({samples, 3})).mean(), samples);
  }
  void step() {
    sgd.step();
    sgd.zero_grad();
  }
  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      backward();
      step();
    }
  }
  std::vector<torch::Tensor> values() const {
    std::vector<torch::Tensor> values;
    for (const torch::Tensor& parameter : net->parameters()) values.push_back(parameter.detach().clone());
    return values;
  }

  World& world;
  torch::nn::Sequential net{torch::nn::Linear(3, 5), torch::nn::Linear(5, 2)};
  SGD sgd;
  DistributedDataParallel ddp;
};

// Runs `program` on every rank and returns what each threw, "" for nothing.
template <class Program>
IntVector<std::string> errors(int ranks, const Program& program) {
  IntVector<std::string> errors(ranks);
  std::mutex mutex;
  try {
    run_ranks(ranks,
              [&](World& world) {
                try {
                  program(world);
                } catch (const std::exception& error) {
                  const std::lock_guard lock(mutex);
                  errors[world.rank()] = error.what();
                  throw;
                }
              },
              {.timeout = std::chrono::seconds(20)});
  } catch (const std::exception&) {  // noted above
  }
  return errors;
}

// Every rank threw, and at least one names the cause.
void expect_refused(const IntVector<std::string>& errors, const std::string& cause) {
  bool named = false;
  std::string all;
  for (int rank = 0; rank < errors.size(); ++rank) {
    EXPECT_NE(errors[rank], "") << "rank " << rank << " went on";
    named = named || contains(errors[rank], cause);
    all += errors[rank] + "\n";
  }
  EXPECT_TRUE(named) << "no \"" << cause << "\" in:\n" << all;
}

class Step : public ::testing::TestWithParam<Sharing> {};
INSTANTIATE_TEST_SUITE_P(Sharings, Step,
                         ::testing::Values(Sharing::kShared, Sharing::kSharedThroughBuckets, Sharing::kSeparate),
                         [](const auto& each) { return name_of(each.param); });

TEST_P(Step, left_out_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    trainer.train(2);
    trainer.backward();
    if (world.rank() == 0) trainer.step();
    trainer.sgd.zero_grad();
    trainer.train(7);
  });
  expect_refused(refused,
                 GetParam() == Sharing::kSeparate ? "parameters written since the last exchange" : "step() number 3");
}

TEST_P(Step, left_out_on_every_rank_is_fine) {
  EXPECT_EQ(errors(3,
                   [](World& world) {
                     Trainer trainer(world, GetParam());
                     trainer.train(2);
                     trainer.backward();
                     trainer.sgd.zero_grad();
                     trainer.train(2);
                   }),
            IntVector<std::string>(3));
}

TEST_P(Step, with_another_learning_rate_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    trainer.train(1);
    if (world.rank() == 1) set_learning_rate(trainer.sgd, 0.2);
    trainer.train(2);
  });
  expect_refused(refused, "lr of parameter group 0 is 0.1");
}

TEST_P(Step, with_another_clipping_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    trainer.train(1);
    if (world.rank() == 1) trainer.sgd.set_clipping({.max_norm = 1});
    trainer.train(2);
  });
  expect_refused(refused, "clipping by norm");
}

TEST_P(Step, with_another_weight_decay_on_one_rank_is_refused) {
  const auto refused = errors(3, [](World& world) {
    Trainer trainer(world, GetParam(), {.lr = 0.1, .weight_decay = world.rank() == 2 ? 1e-4 : 0});
    trainer.train(2);
  });
  expect_refused(refused, "weight_decay of parameter group 0");
}

TEST_P(Step, with_another_loss_scale_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    GradientScaler scaler({.initial_scale = world.rank() == 0 ? 1024.0 : 2048.0});
    for (int i = 0; i < 2; ++i) {
      trainer.ddp.backward(scaler.scale(trainer.net->forward(torch::ones({4, 3})).mean()), 4);
      scaler.step(trainer.sgd);
      trainer.sgd.zero_grad();
    }
  });
  expect_refused(refused, "the loss scale");
}

TEST_P(Step, with_a_parameter_frozen_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    trainer.train(1);
    if (world.rank() == 0) trainer.net->parameters()[1].requires_grad_(false);
    trainer.train(2);
  });
  expect_refused(refused, "which parameters are frozen");
}

TEST_P(Step, leaves_a_parameter_alone_that_every_rank_freezes) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     Trainer trainer(world, GetParam());
                     trainer.train(1);
                     trainer.net->parameters()[1].requires_grad_(false);
                     const auto before = trainer.values();
                     trainer.train(2);
                     const auto after = trainer.values();
                     EXPECT_TRUE(torch::equal(before[1], after[1]));
                     EXPECT_FALSE(torch::equal(before[0], after[0]));
                   }),
            IntVector<std::string>(2));
}

TEST_P(Step, goes_on_where_every_rank_freezes_a_parameter_before_the_first) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     Trainer trainer(world, GetParam());
                     trainer.net->parameters()[1].requires_grad_(false);
                     const auto before = trainer.values();
                     trainer.train(2);
                     EXPECT_TRUE(torch::equal(before[1], trainer.values()[1]));
                   }),
            IntVector<std::string>(2));
}

TEST_P(Step, of_a_parameter_that_was_unfrozen_is_refused_by_name) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Linear net(3, 2);
    net->bias.requires_grad_(false);
    SGD sgd(net->parameters(), {.lr = 0.1});
    DistributedDataParallel ddp(world, *net, sgd, options_of(GetParam()));
    net->bias.requires_grad_(true);
    ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
    sgd.step();
  });
  expect_refused(refused, "parameter bias requires a gradient");
}

TEST_P(Step, after_another_number_of_backward_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    if (world.rank() == 0) {
      const auto no_sync = trainer.ddp.no_sync();
      trainer.backward();
    }
    trainer.train(1);
  });
  expect_refused(refused, "backward()");
}

// Rank 1 has no batches: the step is that of rank 0 alone.
TEST_P(Step, in_join_counts_the_backward_of_the_ranks_with_samples) {
  std::vector<torch::Tensor> expected;
  const auto two_backward = [](Trainer& trainer) {
    {
      const auto no_sync = trainer.ddp.no_sync();
      trainer.backward();
    }
    trainer.backward();
    trainer.step();
  };
  World single = World::single();
  const auto initial = Trainer(single, Sharing::kSeparate).values();
  const auto begin = [&](Trainer& trainer) {
    const torch::NoGradGuard no_grad;
    if (trainer.world.rank() == 0 || GetParam() == Sharing::kSeparate)
      for (std::size_t i = 0; i < initial.size(); ++i) trainer.net->parameters()[i].copy_(initial[i]);
    trainer.ddp.parameters_written();
  };
  {
    Trainer alone(single, GetParam());
    begin(alone);
    two_backward(alone);
    expected = alone.values();
  }
  EXPECT_EQ(errors(2,
                   [&](World& world) {
                     Trainer trainer(world, GetParam());
                     begin(trainer);
                     if (world.rank() == 0) two_backward(trainer);
                     trainer.ddp.join(trainer.sgd);
                     const auto values = trainer.values();
                     for (std::size_t i = 0; i < values.size(); ++i)
                       EXPECT_TRUE(torch::allclose(values[i], expected[i]));
                   }),
            IntVector<std::string>(2));
}

TEST_P(Step, counts_an_empty_batch_before_zero_grad_on_no_rank) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     Trainer trainer(world, GetParam());
                     trainer.backward(world.rank() == 0 ? 4 : 0);
                     trainer.sgd.zero_grad();
                     const auto before = trainer.values();
                     trainer.train(1);
                     // The gradient of the mean of two outputs with respect to the last bias is 1/2.
                     EXPECT_TRUE(torch::allclose(trainer.values()[3], before[3] - 0.05));
                   }),
            IntVector<std::string>(2));
}

TEST_P(Step, after_zero_grad_counts_nothing_that_no_sync_added_before) {
  for (const bool to_none : {true, false})
    EXPECT_EQ(errors(2,
                     [&](World& world) {
                       Trainer trainer(world, GetParam());
                       {
                         const auto no_sync = trainer.ddp.no_sync();
                         trainer.backward(6);
                       }
                       trainer.sgd.zero_grad(to_none);
                       const auto before = trainer.values();
                       trainer.train(1);
                       EXPECT_TRUE(torch::allclose(trainer.values()[3], before[3] - 0.05));
                     }),
              IntVector<std::string>(2));
}

// The gradient of the last bias is 1/2 in each batch: two times the mean is 1.
TEST_P(Step, of_one_rank_counts_uneven_batches_as_several_do) {
  EXPECT_EQ(errors(1,
                   [](World& world) {
                     Trainer trainer(world, GetParam());
                     const auto before = trainer.values();
                     {
                       const auto no_sync = trainer.ddp.no_sync();
                       trainer.backward(2);
                     }
                     trainer.backward(6);
                     trainer.step();
                     EXPECT_TRUE(torch::allclose(trainer.values()[3], before[3] - 0.1));
                   }),
            IntVector<std::string>(1));
}

TEST_P(Step, after_a_failed_backward_in_no_sync_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    torch::Tensor hidden = trainer.net[0]->as<torch::nn::Linear>()->forward(torch::ones({4, 3}));
    hidden.register_hook([](const torch::Tensor& gradient) -> torch::Tensor {
      TORCH_CHECK(!gradient.defined(), "thrown by the test");
      return gradient;
    });
    try {
      const auto no_sync = trainer.ddp.no_sync();
      trainer.ddp.backward(trainer.net[1]->as<torch::nn::Linear>()->forward(hidden).mean(), 4);
    } catch (const std::exception&) {  // the program goes on
    }
    trainer.train(1);
  });
  expect_refused(refused, "after one that failed");
}

// ---- Writes that torch's version counters do not see

std::string after_backward(const std::function<void(Trainer&)>& write) {
  const auto refused = errors(2, [&](World& world) {
    Trainer trainer(world, Sharing::kShared);
    trainer.train(1);
    trainer.backward();
    write(trainer);
    trainer.step();
  });
  expect_refused(refused, refused[0]);
  return refused[0] + refused[1];
}

TEST(SharedStep, refuses_clip_grad_norm_and_names_set_clipping) {
  const std::string error =
      after_backward([](Trainer& trainer) { torch::nn::utils::clip_grad_norm_(trainer.net->parameters(), 1e-3); });
  EXPECT_TRUE(contains(error, "was changed between backward() and step()"));
  EXPECT_TRUE(contains(error, "set_clipping()"));
}

TEST(SharedStep, refuses_clip_grad_value_and_names_set_clipping) {
  const std::string error = after_backward([](Trainer& trainer) {
    if (trainer.world.rank() == 1) torch::nn::utils::clip_grad_value_(trainer.net->parameters(), 1e-3);
  });
  EXPECT_TRUE(contains(error, "set_clipping()"));
}

TEST(SharedStep, accepts_clipping_that_has_nothing_to_clip) {
  EXPECT_EQ(errors(2,
                   [&](World& world) {
                     Trainer trainer(world, Sharing::kShared);
                     trainer.backward();
                     torch::nn::utils::clip_grad_norm_(trainer.net->parameters(), 1e6);
                     trainer.step();
                   }),
            IntVector<std::string>(2));
}

TEST(SharedStep, clips_the_mean_by_hand_where_grad_is_the_mean) {
  EXPECT_EQ(errors(2,
                   [&](World& world) {
                     Trainer trainer(world, Sharing::kSharedThroughBuckets);
                     trainer.backward();
                     torch::nn::utils::clip_grad_norm_(trainer.net->parameters(), 1e-3);
                     trainer.step();
                   }),
            IntVector<std::string>(2));
}

TEST(SharedStep, refuses_clipping_by_hand_on_one_rank_only) {
  const auto refused = errors(2, [&](World& world) {
    Trainer trainer(world, Sharing::kSharedThroughBuckets);
    trainer.backward();
    if (world.rank() == 1) torch::nn::utils::clip_grad_norm_(trainer.net->parameters(), 1e-3);
    trainer.step();
  });
  expect_refused(refused, "gradients written by hand since backward()");
}

TEST(SharedStep, refuses_a_parameter_written_through_data) {
  for (const bool before_backward : {true, false}) {
    const auto refused = errors(2, [&](World& world) {
      Trainer trainer(world, Sharing::kShared);
      trainer.train(1);
      if (before_backward) trainer.net->parameters()[2].data().mul_(0.5);
      trainer.backward();
      if (!before_backward) trainer.net->parameters()[2].data().mul_(0.5);
      trainer.step();
    });
    expect_refused(refused, "parameter 1.weight was written between two steps");
  }
}

TEST(SharedStep, goes_on_after_parameters_were_only_read_through_data) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     Trainer trainer(world, Sharing::kShared);
                     double sum = 0;
                     for (int i = 0; i < 3; ++i) {
                       trainer.train(1);
                       for (const torch::Tensor& parameter : trainer.net->parameters())
                         sum += parameter.data().sum().item<double>();
                     }
                     EXPECT_TRUE(std::isfinite(sum));
                   }),
            IntVector<std::string>(2));
}

// ---- Other optimizers

TEST(StepOfTorch, left_out_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Linear net(3, 2);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    DistributedDataParallel ddp(world, *net, sgd);
    for (int i = 0; i < 5; ++i) {
      sgd.zero_grad();
      ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
      if (world.rank() == 0 || i != 2) sgd.step();
    }
  });
  expect_refused(refused, "parameters written since the last exchange");
}

TEST(StepOfTorch, with_another_learning_rate_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Linear net(3, 2);
    torch::optim::SGD sgd(net->parameters(), world.rank() == 0 ? 0.1 : 0.2);
    DistributedDataParallel ddp(world, *net, sgd);
    ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
  });
  expect_refused(refused, "lr of parameter group 0");
}

TEST(SharedStep, goes_on_from_16_bit_parameters_that_were_loaded) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     torch::nn::Linear net(3, 2);
                     net->to(torch::kBFloat16);
                     SGD sgd(net->parameters(), {.lr = 0.5});
                     DistributedDataParallel ddp(world, *net, sgd);
                     for (const bool loaded : {false, true}) {
                       if (loaded) {
                         const torch::NoGradGuard no_grad;
                         for (torch::Tensor& parameter : net->parameters()) parameter.fill_(2);
                         ddp.parameters_written();
                         set_learning_rate(sgd, 0);
                       }
                       ddp.backward(net->forward(torch::ones({4, 3}, torch::kBFloat16)).mean(), 4);
                       sgd.step();
                       sgd.zero_grad();
                     }
                     for (const torch::Tensor& parameter : net->parameters())
                       EXPECT_TRUE(torch::equal(parameter, torch::full_like(parameter, 2)));
                   }),
            IntVector<std::string>(2));
}

}  // namespace
}  // namespace lockstep
