// SPDX-License-Identifier: Apache-2.0
// Ranks that would not make the same step: left out, or with other settings.
#include <torch/optim/sgd.h>

#include "lockstep/gradient_scaler.h"
#include "tests/step_programs.h"

namespace lockstep {
namespace {

using testing::errors;
using testing::expect_refused;
using testing::options_of;
using testing::Sharing;
using testing::Trainer;

class AnyStep : public testing::EachSharing {};
INSTANTIATE_TEST_SUITE_P(Sharings, AnyStep, testing::all_sharings(),
                         [](const auto& each) { return name_of(each.param); });

TEST_P(AnyStep, left_out_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    trainer.train(2);
    trainer.backward();
    if (world.rank() == 0) trainer.step();
    trainer.sgd.zero_grad();
    trainer.train(7);
  });
  expect_refused(refused, GetParam() == Sharing::kSeparate ? "the number of step() calls" : "step() number 3");
}

TEST_P(AnyStep, left_out_on_every_rank_is_fine) {
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

TEST_P(AnyStep, with_another_learning_rate_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    trainer.train(1);
    if (world.rank() == 1) set_learning_rate(trainer.sgd, 0.2);
    trainer.train(2);
  });
  expect_refused(refused, "lr of parameter group 0 is 0.1");
}

TEST_P(AnyStep, with_another_clipping_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    trainer.train(1);
    if (world.rank() == 1) trainer.sgd.set_clipping({.max_norm = 1});
    trainer.train(2);
  });
  expect_refused(refused, "clipping by norm");
}

TEST_P(AnyStep, with_another_weight_decay_on_one_rank_is_refused) {
  const auto refused = errors(3, [](World& world) {
    Trainer trainer(world, GetParam(), {.lr = 0.1, .weight_decay = world.rank() == 2 ? 1e-4 : 0});
    trainer.train(2);
  });
  expect_refused(refused, "weight_decay of parameter group 0");
}

TEST_P(AnyStep, with_another_loss_scale_on_one_rank_is_refused) {
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

TEST_P(AnyStep, with_a_plain_backward_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    for (int i = 0; i < 2; ++i) {
      world.rank() == 0 ? trainer.plain_backward() : trainer.backward();
      trainer.step();
    }
  });
  expect_refused(refused, GetParam() == Sharing::kShared
                              ? "rank 1 is in backward(), rank 0 in step() after loss.backward()"
                              : "loss.backward() instead of ddp.backward() is 1 on rank 0, 0 on rank 1");
}

TEST_P(AnyStep, with_a_parameter_frozen_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam());
    trainer.train(1);
    if (world.rank() == 0) trainer.net->parameters()[1].requires_grad_(false);
    trainer.train(2);
  });
  expect_refused(refused, "which parameters are frozen");
}

// 3 * 3 + 4 * 4 = 5 * 5: sets of several parameters that a sum of squares takes for one.
TEST_P(AnyStep, with_another_set_of_frozen_parameters_on_one_rank_is_refused) {
  for (const int ranks : {2, 3, 4}) {
    const auto refused = errors(ranks, [](World& world) {
      torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3), torch::nn::Linear(3, 2));
      SGD sgd(net->parameters(), {.lr = 0.1});
      DistributedDataParallel ddp(world, *net, sgd, options_of(GetParam()));
      for (int i = 0; i < 3; ++i) {
        ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
        sgd.step();
        sgd.zero_grad();
        for (const int frozen : world.rank() == 1 ? std::vector<int>{4} : std::vector<int>{2, 3})
          net->parameters()[static_cast<size_t>(frozen)].requires_grad_(false);
      }
    });
    expect_refused(refused, "which parameters are frozen differs between rank 0 and rank 1: number 2");
  }
}

// Each setting is named however many there are.
TEST_P(AnyStep, with_another_learning_rate_of_a_late_group_on_one_rank_is_refused_by_its_name) {
  for (const int ranks : {2, 3}) {
    const auto refused = errors(ranks, [](World& world) {
      torch::nn::Sequential net(torch::nn::Linear(2, 2));
      AdamW adamw(net->parameters(), {.lr = 0.1});
      for (int i = 1; i < 30; ++i) {
        torch::nn::Linear layer(2, 2);
        net->push_back(layer);
        adamw.add_param_group(parameter_group(layer->parameters(), AdamWOptions{.lr = 0.1}));
      }
      DistributedDataParallel ddp(world, *net, adamw, options_of(GetParam()));
      for (int i = 0; i < 2; ++i) {
        ddp.backward(net->forward(torch::ones({4, 2})).mean(), 4);
        adamw.step();
        adamw.zero_grad();
        if (world.rank() == 1) adamw.param_groups()[27].options().set_lr(0.2);
      }
    });
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_TRUE(testing::contains(refused[rank], "lr of parameter group 27")) << refused[rank];
  }
}

TEST_P(AnyStep, with_another_number_of_groups_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Linear net(3, 2);
    SGD sgd(world.rank() == 0 ? net->parameters() : std::vector{net->weight}, {.lr = 0.1});
    if (world.rank() == 1) sgd.add_param_group(parameter_group({net->bias}, SGDOptions{.lr = 0.1}));
    DistributedDataParallel ddp(world, *net, sgd, options_of(GetParam()));
    ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
    sgd.step();
    ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
  });
  expect_refused(refused, "the number of parameter groups is 1 on rank 0, 2 on rank 1");
}

TEST_P(AnyStep, after_a_state_was_set_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, GetParam(), {.lr = 0.1, .momentum = 0.9});
    trainer.train(2);
    world.barrier();
    if (world.rank() == 1) trainer.sgd.set_state(trainer.net->parameters()[0], {});
    trainer.train(2);
  });
  expect_refused(refused, "how often the optimizer's state was set");
}

TEST_P(AnyStep, goes_on_after_a_state_was_set_on_every_rank) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     Trainer trainer(world, GetParam(), {.lr = 0.1, .momentum = 0.9});
                     trainer.train(1);
                     world.barrier();
                     trainer.sgd.set_state(trainer.net->parameters()[3], {});
                     world.barrier();
                     const torch::Tensor before = trainer.values()[3];
                     trainer.train(1);
                     EXPECT_TRUE(torch::allclose(trainer.values()[3], before - 0.05));
                   }),
            IntVector<std::string>(2));
}

TEST_P(AnyStep, leaves_a_parameter_alone_that_every_rank_freezes) {
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

TEST_P(AnyStep, goes_on_where_every_rank_freezes_a_parameter_before_the_first) {
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

TEST_P(AnyStep, of_a_parameter_that_was_unfrozen_is_refused_by_name) {
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

TEST_P(AnyStep, after_a_failed_backward_in_no_sync_is_refused) {
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

TEST(StepOfTorch, with_another_weight_decay_on_one_rank_is_refused) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Linear net(3, 2);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).weight_decay(world.rank() * 0.1));
    DistributedDataParallel ddp(world, *net, sgd);
    ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
  });
  expect_refused(refused, "weight_decay of parameter group 0");
}

TEST(StepOfTorch, of_a_layer_that_was_added_is_refused) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(3, 2));
    torch::optim::SGD sgd(net->parameters(), 0.1);
    DistributedDataParallel ddp(world, *net, sgd);
    torch::nn::Linear added(2, 2);
    net->push_back(added);
    sgd.add_param_group(torch::optim::OptimizerParamGroup(added->parameters()));
    ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
  });
  expect_refused(refused, "a parameter of shape [2, 2] that was not in the module");
}

TEST(StepOfTorch, that_the_ranks_were_not_told_of_needs_the_same_frozen_parameters) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Linear net(3, 2);
    DistributedDataParallel ddp(world, *net);
    if (world.rank() == 1) net->bias.requires_grad_(false);
    ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
  });
  expect_refused(refused, "which parameters are frozen");
}

// ---- Parameters of each rank that are no longer the same

// One rank's model with an optimizer of torch's that DistributedDataParallel does not know, as in Python.
struct UntoldTrainer {
  explicit UntoldTrainer(World& all, double lr = 0.1, double momentum = 0)
      : world(all), sgd(net->parameters(), torch::optim::SGDOptions(lr).momentum(momentum)), ddp(world, *net) {}

  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      sgd.zero_grad();
      ddp.backward(net->forward(torch::full({4, 3}, 1.0 + world.rank())).square().mean(), 4);
      sgd.step();
    }
  }

  World& world;
  torch::nn::Linear net{3, 2};
  torch::optim::SGD sgd;
  DistributedDataParallel ddp;
};

TEST(StepOfTorch, after_another_learning_rate_that_the_ranks_were_not_told_of_is_refused) {
  for (const int ranks : {2, 3, 4, 7}) {
    const auto refused = errors(ranks, [](World& world) {
      UntoldTrainer trainer(world, world.rank() == 1 ? 0.2 : 0.1);
      trainer.train(2);
    });
    expect_refused(refused, "the ranks differ: the parameters of rank");
  }
}

TEST(StepOfTorch, after_a_state_that_one_rank_alone_has_loaded_is_refused) {
  for (const testing::Nodes& machines : {testing::Nodes{0, 0}, testing::Nodes{0, 1}, testing::Nodes{0, 0, 1}}) {
    const auto refused = testing::errors_on(machines, [](World& world) {
      UntoldTrainer trainer(world, 0.1, 0.9);
      trainer.train(3);
      if (world.rank() == 1)
        for (auto& [parameter, state] : trainer.sgd.state())
          static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().mul_(2);
      trainer.train(2);
    });
    expect_refused(refused, "the ranks differ: the parameters of rank");
  }
}

TEST(StepOfTorch, finds_a_single_byte_within_a_hundred_steps) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Linear net(700, 700);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    DistributedDataParallel ddp(world, *net);
    if (world.rank() == 1) static_cast<float*>(net->weight.mutable_data_ptr())[333'333] += 1;
    for (int i = 0; i < 100; ++i) {
      sgd.zero_grad();
      ddp.backward(net->forward(torch::ones({1, 700})).mean(), 1);
      sgd.step();
    }
  });
  expect_refused(refused, "the ranks differ: the parameters of rank");
}

TEST(StepOfTorch, goes_on_where_all_ranks_load_the_same_state) {
  EXPECT_EQ(errors(3,
                   [](World& world) {
                     UntoldTrainer trainer(world, 0.1, 0.9);
                     trainer.train(3);
                     for (auto& [parameter, state] : trainer.sgd.state())
                       static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().mul_(2);
                     set_learning_rate(trainer.sgd, 0.05);
                     trainer.train(4);
                   }),
            IntVector<std::string>(3));
}

// Shared through buckets on several machines: each machine has a copy.
TEST(SharedStepThroughBuckets, finds_a_copy_that_one_machine_alone_has_written) {
  const auto refused = testing::errors_on({0, 0, 1}, [](World& world) {
    Trainer trainer(world, Sharing::kSharedThroughBuckets);
    trainer.train(2);
    world.barrier();
    {
      const torch::NoGradGuard no_grad;
      trainer.net->parameters()[1].fill_(world.rank() < 2 ? 1 : 2);
    }
    trainer.ddp.parameters_written();
    trainer.train(2);
  });
  expect_refused(refused, "the ranks differ: the parameters of rank");
}

// Each rank goes its own way: local SGD.
TEST(StepOfTorch, in_no_sync_may_make_the_parameters_of_the_ranks_differ) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     UntoldTrainer trainer(world);
                     trainer.train(1);
                     for (int i = 0; i < 3; ++i) {
                       const auto no_sync = trainer.ddp.no_sync();
                       trainer.train(1);
                     }
                     trainer.train(2);
                   }),
            IntVector<std::string>(2));
}

// As sharpness-aware minimisation, which steps along each rank's own gradient and back.
TEST(StepOfTorch, after_a_perturbation_of_each_rank_in_no_sync_is_fine) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     UntoldTrainer trainer(world);
                     for (int i = 0; i < 3; ++i) {
                       const torch::Tensor before = trainer.net->weight.detach().clone();
                       trainer.sgd.zero_grad();
                       {
                         const auto no_sync = trainer.ddp.no_sync();
                         const torch::Tensor input = torch::full({4, 3}, 1.0 + world.rank());
                         trainer.ddp.backward(trainer.net->forward(input).square().mean(), 4);
                         const torch::NoGradGuard no_grad;
                         trainer.net->weight.add_(trainer.net->weight.grad(), 0.05);
                       }
                       trainer.sgd.zero_grad();
                       trainer.ddp.backward(trainer.net->forward(torch::ones({4, 3})).square().mean(), 4);
                       const torch::NoGradGuard no_grad;
                       trainer.net->weight.copy_(before);
                       trainer.sgd.step();
                     }
                   }),
            IntVector<std::string>(2));
}

// ---- Gradients in shared memory: step() exchanges what backward() has not

TEST(SharedStep, of_a_rank_that_left_out_its_backward_is_refused) {
  const auto refused = errors(3, [](World& world) {
    Trainer trainer(world, Sharing::kShared);
    trainer.train(1);
    if (world.rank() != 1) trainer.backward();
    trainer.step();
    trainer.train(2);
  });
  expect_refused(refused, "rank 0 is in backward(), rank 1 in step() without a backward()");
}

TEST(SharedStep, of_a_rank_that_left_out_its_plain_backward_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, Sharing::kShared);
    if (world.rank() == 0) trainer.plain_backward();
    trainer.step();
  });
  expect_refused(refused, "rank 0 is in step() after loss.backward() or no_sync(), rank 1 in step() without");
}

TEST(SharedStep, left_out_after_a_plain_backward_is_refused) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, Sharing::kShared);
    trainer.plain_backward();
    if (world.rank() == 0) trainer.step();
    trainer.sgd.zero_grad();
    trainer.train(2);
  });
  expect_refused(refused, "rank 1 is in backward(), rank 0 in step()");
}

TEST(SharedStep, after_backward_of_both_kinds_is_refused) {
  for (const bool plain_first : {true, false}) {
    const auto refused = errors(2, [&](World& world) {
      Trainer trainer(world, Sharing::kShared);
      if (plain_first) trainer.plain_backward();
      trainer.backward();
      if (!plain_first) trainer.plain_backward();
      trainer.step();
    });
    expect_refused(refused, plain_first ? "would add to a gradient of 0.weight that it has not counted"
                                        : "the gradient of 0.weight was changed between backward() and step()");
  }
}

TEST(SharedStep, before_the_last_virtual_shard_is_refused) {
  const auto refused = errors(1, [](World& world) {
    torch::nn::Linear net(3, 2);
    SGD sgd(net->parameters(), {.lr = 0.1});
    DistributedDataParallel ddp(world, *net, sgd, {.virtual_shards = 2});
    ddp.backward(net->forward(torch::ones({4, 3})).mean(), 4);
    sgd.step();
  });
  expect_refused(refused, "step() before all of the 2 backward()");
}

}  // namespace
}  // namespace lockstep
