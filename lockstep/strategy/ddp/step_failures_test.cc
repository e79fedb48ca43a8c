// SPDX-License-Identifier: Apache-2.0
// A rank whose backward() fails ends the others at once, by name; and what ranks on several machines must have alike.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/utils/clip_grad.h>

#include "tests/step_programs.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::errors;
using testing::errors_on;
using testing::expect_refused;
using testing::Nodes;
using testing::Sharing;
using testing::Trainer;

constexpr std::chrono::minutes kTooLong{30};  // a rank that waits for its deadline does not end in time

struct Failing : torch::autograd::Function<Failing> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, const torch::autograd::tensor_list&) {
    throw std::runtime_error("thrown by the program");
  }
};

// Fails after the last layer's gradients.
torch::Tensor failing_loss(Trainer& trainer) {
  const torch::Tensor hidden = trainer.net->ptr(0)->as<torch::nn::Linear>()->forward(torch::ones({4, 3}));
  return trainer.net->ptr(1)->as<torch::nn::Linear>()->forward(Failing::apply(hidden)).mean();
}

struct Place {
  Sharing sharing;
  Nodes machines;
};
class FailedBackward : public ::testing::TestWithParam<Place> {};
INSTANTIATE_TEST_SUITE_P(Places, FailedBackward,
                         ::testing::Values(Place{Sharing::kShared, {0, 0, 0}},
                                           Place{Sharing::kSharedThroughBuckets, {0, 0, 0}},
                                           Place{Sharing::kSeparate, {0, 0, 0}}, Place{Sharing::kShared, {0, 1, 0}},
                                           Place{Sharing::kSeparate, {0, 1, 2}}));

// Rank 1's backward() fails after a step in which the order of the buckets is settled.
IntVector<std::string> errors_beside(const Place& place, const std::function<void(Trainer&)>& fail) {
  return errors_on(
      place.machines,
      [&](World& world) {
        Trainer trainer(world, place.sharing);
        trainer.train(1);
        if (world.rank() == 1) fail(trainer);
        trainer.train(2);
      },
      kTooLong);
}

// Every other rank of its machine names it, and one of those to whose machine its connection breaks; these end, too.
void expect_rank_1_named(const IntVector<std::string>& errors, const Place& place) {
  bool named = false;
  for (int rank = 0; rank < errors.size(); ++rank) {
    if (rank == 1) continue;
    const bool same_machine = place.machines[static_cast<size_t>(rank)] == place.machines[1];
    EXPECT_TRUE(contains(errors[rank], same_machine ? "rank 1 failed" : "lost"));
    named = named || contains(errors[rank], "rank 1");
  }
  EXPECT_TRUE(named);
}

TEST_P(FailedBackward, ends_the_other_ranks_by_name) {
  const auto refused = errors_beside(GetParam(), [](Trainer& t) { t.ddp.backward(failing_loss(t), 4); });
  EXPECT_TRUE(contains(refused[1], "thrown by the program"));
  expect_rank_1_named(refused, GetParam());
}

TEST_P(FailedBackward, that_is_caught_lets_the_program_make_no_other) {
  const auto refused =
      errors_beside(GetParam(), [](Trainer& t) { EXPECT_THROW(t.ddp.backward(failing_loss(t), 4), std::exception); });
  EXPECT_TRUE(contains(refused[1], "that failed half-way"));
  expect_rank_1_named(refused, GetParam());
}

TEST_P(FailedBackward, lets_no_plain_one_follow) {
  const auto refused = errors_beside(GetParam(), [](Trainer& t) {
    EXPECT_THROW(t.ddp.backward(failing_loss(t), 4), std::exception);
    t.plain_backward();
    t.step();
  });
  EXPECT_NE(refused[1], "");
  expect_rank_1_named(refused, GetParam());
}

class FailedPlainBackward : public FailedBackward {};
INSTANTIATE_TEST_SUITE_P(Places, FailedPlainBackward,
                         ::testing::Values(Place{Sharing::kSharedThroughBuckets, {0, 0, 0}},
                                           Place{Sharing::kSeparate, {0, 0, 0}}, Place{Sharing::kShared, {0, 1, 0}}));

TEST_P(FailedPlainBackward, ends_the_other_ranks_by_name) {
  const auto refused = errors_beside(GetParam(), [](Trainer& t) {
    EXPECT_THROW(failing_loss(t).backward(), std::exception);
    t.plain_backward();
  });
  EXPECT_TRUE(contains(refused[1], "that failed half-way"));
  expect_rank_1_named(refused, GetParam());
}

// ---- What ranks of different machines have alike

const Nodes kMachines{0, 0, 1};  // the last rank is alone

TEST(OverMachines, parameters_written_on_one_machine_only_are_refused) {
  expect_refused(errors_on(kMachines,
                           [](World& world) {
                             Trainer trainer(world, Sharing::kShared);
                             trainer.train(1);
                             if (world.rank() == 2)
                               trainer.ddp.write_parameters([&] { trainer.net->parameters()[0].mul_(0.5); });
                             trainer.train(2);
                           }),
                 " wants ");
}

TEST(OverMachines, a_mean_that_one_machine_clips_is_refused) {
  expect_refused(errors_on(kMachines,
                           [](World& world) {
                             Trainer trainer(world, Sharing::kShared);
                             trainer.train(1);
                             trainer.backward();
                             if (world.rank() == 2) torch::nn::utils::clip_grad_norm_(trainer.net->parameters(), 1e-6);
                             trainer.step();
                             trainer.train(2);
                           }),
                 "gradients written by hand since backward()");
}

TEST(OverMachines, a_learning_rate_of_one_step_is_refused) {
  expect_refused(errors_on(kMachines,
                           [](World& world) {
                             Trainer trainer(world, Sharing::kShared);
                             trainer.train(1);
                             trainer.backward();
                             if (world.rank() == 2) set_learning_rate(trainer.sgd, 0.2);
                             trainer.step();
                             set_learning_rate(trainer.sgd, 0.1);
                             trainer.train(2);
                           }),
                 "a setting of the last step()");
}

// ---- Separate parameters

TEST(SeparateParameters, a_step_left_out_is_found_also_where_all_write) {
  expect_refused(errors(2,
                        [](World& world) {
                          Trainer trainer(world, Sharing::kSeparate);
                          trainer.train(1);
                          trainer.backward();
                          if (world.rank() == 0) trainer.sgd.step();
                          trainer.sgd.zero_grad();
                          trainer.net->parameters()[0].data().mul_(0.5);
                          trainer.train(2);
                        }),
                 "the number of step() calls");
}

// The rank without samples needs to know that of a hook before it begins, the others only at the end.
TEST(WithAHook, settings_that_differ_are_named_beside_a_rank_without_samples) {
  expect_refused(errors(3,
                        [](World& world) {
                          torch::nn::Linear net(3, 2);
                          SGD sgd(net->parameters(), {.lr = 0.1});
                          DistributedDataParallel ddp(world, *net, sgd, {.hook = top_k_hook(0.5)});
                          for (int step = 0; step < 3; ++step) {
                            const int samples = step == 1 && world.rank() == 2 ? 0 : 4;
                            if (step == 1 && world.rank() == 1) set_learning_rate(sgd, 0.2);
                            const torch::Tensor loss = net->forward(torch::ones({4, 3})).mean();
                            ddp.backward(samples == 0 ? torch::Tensor() : loss, samples);
                            sgd.step();
                            sgd.zero_grad();
                          }
                        }),
                 "lr of parameter group 0");
}

}  // namespace
}  // namespace lockstep
