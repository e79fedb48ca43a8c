// SPDX-License-Identifier: Apache-2.0
// What a step counts: batches and samples of every rank since the last zero_grad().
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

}  // namespace
}  // namespace lockstep
