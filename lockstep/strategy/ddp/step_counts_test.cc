// SPDX-License-Identifier: Apache-2.0
// Counts of a step: batches and samples of every rank since the last zero_grad().
#include "tests/step_programs.h"

namespace lockstep {
namespace {

using testing::errors;
using testing::expect_refused;
using testing::Sharing;
using testing::Trainer;

class Counts : public testing::EachSharing {};
INSTANTIATE_TEST_SUITE_P(Sharings, Counts, testing::all_sharings(),
                         [](const auto& each) { return name_of(each.param); });

TEST_P(Counts, after_another_number_of_backward_is_refused) {
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

void without_exchange(Trainer& trainer, int samples) {
  const auto no_sync = trainer.ddp.no_sync();
  trainer.backward(samples);
}

TEST_P(Counts, after_an_empty_batch_and_another_number_of_backward_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    without_exchange(trainer, world.rank() == 0 ? 4 : 0);
    if (world.rank() == 0) without_exchange(trainer, 4);
    trainer.train(2);
  });
  expect_refused(refused, "backward()");
}

// Rank 1 can't see that it is over: its gradients are undefined before and after. A step on inputs of ones is the same
// for any number of samples, but not for another number of backward().
TEST_P(Counts, before_zero_grad_are_dropped_on_a_rank_without_samples) {
  const auto program = [](World& world, bool drops) {
    Trainer trainer(world, GetParam());
    {
      const torch::NoGradGuard no_grad;
      for (const torch::Tensor& p : trainer.net->parameters()) torch::Tensor(p).fill_(0.5);
      trainer.ddp.parameters_written();
    }
    if (drops) without_exchange(trainer, world.rank() == 0 ? 4 : 0);
    trainer.sgd.zero_grad();
    trainer.train(1);
    return trainer.values();
  };
  EXPECT_EQ(errors(2,
                   [&](World& world) {
                     const auto expected = program(world, false), values = program(world, true);
                     for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(torch::allclose(values[i], expected[i]));
                   }),
            IntVector<std::string>(2));
}

// Rank 1 has no batches: the step is that of rank 0 alone.
TEST_P(Counts, in_join_counts_the_backward_of_the_ranks_with_samples) {
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
      for (size_t i = 0; i < initial.size(); ++i) trainer.net->parameters()[i].copy_(initial[i]);
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
                     for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(torch::allclose(values[i], expected[i]));
                   }),
            IntVector<std::string>(2));
}

// As in a loop that begins with zero_grad().
TEST_P(Counts, in_join_leave_out_a_gradient_that_a_step_has_used) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     Trainer trainer(world, GetParam());
                     trainer.backward();
                     trainer.sgd.step();
                     const auto before = trainer.values();
                     trainer.ddp.join(trainer.sgd);
                     const auto after = trainer.values();
                     for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], after[i]));
                   }),
            IntVector<std::string>(2));
}

TEST_P(Counts, counts_an_empty_batch_before_zero_grad_on_no_rank) {
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

TEST_P(Counts, after_zero_grad_counts_nothing_that_no_sync_added_before) {
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
TEST_P(Counts, of_one_rank_counts_uneven_batches_as_several_do) {
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

// ---- Gradients in shared memory, where .grad is each rank's own and the last bias has the gradient 1/2 in each batch

void expect_last_bias_moves(double by, int ranks, const std::function<void(Trainer&)>& program) {
  EXPECT_EQ(errors(ranks,
                   [&](World& world) {
                     Trainer trainer(world, Sharing::kShared);
                     const torch::Tensor before = trainer.values()[3];
                     program(trainer);
                     EXPECT_TRUE(torch::allclose(trainer.values()[3], before - by)) << trainer.values()[3] - before;
                   }),
            IntVector<std::string>(ranks));
}

TEST(SharedCounts, go_on_after_step_until_zero_grad) {
  expect_last_bias_moves(0.05 + 0.1 + 0.05, 2, [](Trainer& trainer) {
    trainer.backward(trainer.world.rank() == 0 ? 2 : 6);
    trainer.sgd.step();
    trainer.backward(trainer.world.rank() == 0 ? 5 : 1);
    trainer.step();
    trainer.train(1);
  });
}

TEST(SharedCounts, are_those_of_the_same_gradient_in_a_second_step) {
  expect_last_bias_moves(0.05 + 0.05, 3, [](Trainer& trainer) {
    trainer.backward(trainer.world.rank() + 1);
    trainer.sgd.step();
    trainer.sgd.step();
  });
}

TEST(SharedCounts, begin_again_after_gradients_were_zeroed_in_place) {
  expect_last_bias_moves(0.05 + 0.05, 2, [](Trainer& trainer) {
    trainer.backward(trainer.world.rank() + 1);
    trainer.sgd.step();
    trainer.sgd.zero_grad(/*set_to_none=*/false);
    trainer.backward(4);
    trainer.sgd.step();
  });
}

TEST(SharedCounts, begin_again_with_a_plain_backward_after_zero_grad) {
  for (const bool to_none : {true, false})
    expect_last_bias_moves(0.05 + 0.05, 2, [&](Trainer& trainer) {
      trainer.backward(trainer.world.rank() + 1);
      trainer.sgd.step();
      trainer.sgd.zero_grad(to_none);
      trainer.plain_backward();
      trainer.sgd.step();
    });
}

TEST(SharedCounts, leave_out_a_step_with_gradients_of_zero) {
  expect_last_bias_moves(0.05 + 0.05, 2, [](Trainer& trainer) {
    for (int i = 0; i < 2; ++i) {
      trainer.backward(trainer.world.rank() + 1);
      trainer.sgd.step();
      trainer.sgd.zero_grad(/*set_to_none=*/false);
      trainer.sgd.step();
    }
  });
}

TEST(SharedCounts, take_a_plain_backward_while_a_rank_is_in_join) {
  expect_last_bias_moves(0.05 + 0.05, 2, [](Trainer& trainer) {
    trainer.train(1);
    if (trainer.world.rank() == 0) {
      trainer.plain_backward();
      trainer.step();
    }
    trainer.ddp.join(trainer.sgd);
  });
}

TEST(SharedCounts, begin_again_after_join_with_virtual_shards) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     torch::nn::Linear net(3, 2);
                     SGD sgd(net->parameters(), {.lr = 0.1});
                     DistributedDataParallel ddp(world, *net, sgd, {.virtual_shards = 4});
                     const torch::Tensor before = net->bias.detach().clone();
                     const auto train = [&] {
                       for (int shard = 0; shard < 2; ++shard)
                         ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
                       sgd.step();
                       sgd.zero_grad();
                     };
                     if (world.rank() == 0) train();
                     ddp.join(sgd);
                     train();
                     EXPECT_TRUE(torch::allclose(net->bias.detach(), before - 2 * 0.05));
                   }),
            IntVector<std::string>(2));
}

TEST(SharedCounts, are_refused_where_zero_grad_was_called_on_some_ranks_only) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, Sharing::kShared);
    trainer.backward();
    trainer.sgd.step();
    if (world.rank() == 0) trainer.sgd.zero_grad();
    trainer.train(1);
  });
  expect_refused(refused, "rank 0 called backward() 1 times since the last zero_grad(), rank 1 2 times");
}

TEST(SharedCounts, leave_out_gradients_that_the_optimizer_does_not_hold) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     torch::nn::Linear net(3, 2);
                     SGD sgd({net->bias}, {.lr = 0.1});
                     DistributedDataParallel ddp(world, *net, sgd);
                     const torch::Tensor before = net->bias.detach().clone();
                     for (int i = 0; i < 3; ++i) {
                       ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
                       sgd.step();
                       sgd.zero_grad();
                     }
                     EXPECT_TRUE(torch::allclose(net->bias.detach(), before - 3 * 0.05));
                   }),
            IntVector<std::string>(2));
}

}  // namespace
}  // namespace lockstep
