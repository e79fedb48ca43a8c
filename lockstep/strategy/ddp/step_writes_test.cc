// SPDX-License-Identifier: Apache-2.0
// Gradients and parameters that are written by hand, also in ways that torch's version counters do not see.
#include <atomic>
#include <functional>
#include <stdexcept>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/utils/clip_grad.h>

#include "tests/step_programs.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::errors;
using testing::expect_refused;
using testing::options_of;
using testing::Sharing;
using testing::Trainer;

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

// The gradients were computed at parameters that each rank has halved, and so are wrong.
TEST(SharedStep, refuses_a_write_before_backward_also_where_parameters_written_follows) {
  for (const Sharing sharing : {Sharing::kShared, Sharing::kSharedThroughBuckets})
    expect_refused(errors(2,
                          [&](World& world) {
                            Trainer trainer(world, sharing);
                            trainer.train(1);
                            {
                              const torch::NoGradGuard no_grad;
                              trainer.net->parameters()[0].mul_(0.5);
                            }
                            trainer.backward();
                            trainer.ddp.parameters_written();
                            trainer.step();
                          }),
                   "was written between two steps");
}

TEST(SharedStep, refuses_an_embedding_that_writes_its_weight_in_forward_and_names_max_norm) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(20, 8).max_norm(0.5));
    SGD sgd(net->parameters(), {.lr = 0.1});
    DistributedDataParallel ddp(world, *net, sgd);
    ddp.backward(net->forward(torch::arange(world.rank(), world.rank() + 4)).mean(), 4);
    sgd.step();
  });
  expect_refused(refused, "max_norm");
  expect_refused(refused, "write_parameters()");
}

TEST(SharedStep, refuses_clip_grad_norm_and_names_what_works) {
  const std::string error =
      after_backward([](Trainer& trainer) { torch::nn::utils::clip_grad_norm_(trainer.net->parameters(), 1e-3); });
  EXPECT_TRUE(contains(error, "was changed between backward() and step()"));
  EXPECT_TRUE(contains(error, "set_clipping()"));
}

TEST(SharedStep, refuses_clip_grad_value_and_names_what_works) {
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

// Zeros stay zeros where it is scaled.
TEST(SharedStep, refuses_a_gradient_of_few_rows_that_is_scaled_through_a_pointer) {
  const auto refused = errors(2, [](World& world) {
    torch::nn::Embedding words(10000, 16);
    SGD sgd(words->parameters(), {.lr = 0.1});
    DistributedDataParallel ddp(world, *words, sgd);
    ddp.backward(words->forward(torch::arange(48) * 199 + 3).square().mean(), 48);
    const torch::Tensor gradient = words->weight.grad();
    auto* const values = static_cast<float*>(gradient.mutable_data_ptr());
    for (int64_t i = 0; i < gradient.numel(); ++i) values[i] *= 0.5F;
    sgd.step();
  });
  expect_refused(refused, "was changed between backward() and step()");
}

TEST(SharedStep, refuses_a_whole_parameter_written_through_a_pointer) {
  for (const Sharing sharing : {Sharing::kShared, Sharing::kSharedThroughBuckets})
    expect_refused(errors(2,
                          [&](World& world) {
                            Trainer trainer(world, sharing);
                            trainer.train(1);
                            world.barrier();
                            const torch::Tensor weight = trainer.net->parameters()[2];
                            auto* const values = weight.data_ptr<float>();
                            for (int i = 0; i < weight.numel(); ++i)
                              std::atomic_ref(values[i]).fetch_add(1);  // both ranks
                            world.barrier();
                            trainer.train(1);
                          }),
                   "parameter 1.weight was written between two steps");
}

// A collective writes through a pointer, too.
TEST(SharedStep, refuses_gradients_that_were_summed_by_hand) {
  const std::string error = after_backward([](Trainer& trainer) {
    for (const torch::Tensor& parameter : trainer.net->parameters()) trainer.world.all_reduce(parameter.mutable_grad());
  });
  EXPECT_TRUE(contains(error, "was changed between backward() and step()"));
}

TEST(SharedStep, refuses_gradients_that_no_backward_has_exchanged) {
  for (const int steps : {0, 2})
    expect_refused(errors(2,
                          [&](World& world) {
                            Trainer trainer(world, Sharing::kSharedThroughBuckets);
                            trainer.train(steps);
                            for (torch::Tensor& parameter : trainer.net->parameters())
                              parameter.mutable_grad() = torch::full_like(parameter, world.rank());
                            trainer.step();
                          }),
                   "gradients that were not exchanged");
}

TEST(SharedStep, takes_the_same_mean_a_second_time) {
  EXPECT_EQ(errors(2,
                   [](World& world) {
                     Trainer trainer(world, Sharing::kSharedThroughBuckets);
                     const torch::Tensor before = trainer.values()[3];
                     trainer.backward();
                     trainer.sgd.step();
                     trainer.sgd.step();
                     EXPECT_TRUE(torch::allclose(trainer.values()[3], before - 0.1));
                   }),
            IntVector<std::string>(2));
}

TEST(SharedStep, refuses_a_state_that_was_written_by_hand) {
  for (const Sharing sharing : {Sharing::kShared, Sharing::kSharedThroughBuckets})
    expect_refused(errors(2,
                          [&](World& world) {
                            Trainer trainer(world, sharing, {.lr = 0.1, .momentum = 0.9});
                            trainer.train(2);
                            trainer.sgd.state_of(trainer.net->parameters()[0]).at("momentum_buffer").mul_(0.5);
                            trainer.train(1);
                          }),
                   "the optimizer's state was written by hand");
}

TEST(SharedStep, after_the_end_of_its_exchange_is_refused) {
  for (const Sharing sharing : {Sharing::kShared, Sharing::kSharedThroughBuckets})
    expect_refused(errors(2,
                          [&](World& world) {
                            torch::nn::Linear net(3, 2);
                            SGD sgd(net->parameters(), {.lr = 0.1});
                            { const DistributedDataParallel not_kept(world, *net, sgd, options_of(sharing)); }
                            net->forward(torch::ones({4, 3})).mean().backward();
                            sgd.step();
                          }),
                   "whose DistributedDataParallel is gone");
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

// ---- write_parameters(): each rank writes into copies of its own, and what all have written alike is written once.

const std::vector<Sharing> kSharedInSomeWay{Sharing::kShared, Sharing::kSharedThroughBuckets};
const std::vector<Sharing> kAnySharing{Sharing::kShared, Sharing::kSharedThroughBuckets, Sharing::kSeparate};

void halve(const std::vector<torch::Tensor>& tensors) {
  for (const torch::Tensor& tensor : tensors) torch::Tensor(tensor).mul_(0.5);
}

// Trains, halves all parameters in some way, trains on, on one rank and on three.
void expect_halved(const std::function<void(Trainer&)>& halve_parameters,
                   const std::vector<Sharing>& sharings = kAnySharing) {
  for (const Sharing sharing : sharings) {
    const auto train = [&](World& world) {
      Trainer trainer(world, sharing);
      trainer.ddp.write_parameters([&] { testing::set_numbers(trainer.net->parameters()); });
      trainer.train(2);
      halve_parameters(trainer);
      trainer.train(2);
      return trainer.values();
    };
    World single = World::single();
    const auto expected = train(single);
    run_ranks(3, [&](World& world) {
      const auto found = train(world);
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-5, 1e-7));
    });
  }
}

TEST(WriteParameters, may_depend_on_the_values_before) {
  expect_halved([](Trainer& trainer) { trainer.ddp.write_parameters([&] { halve(trainer.net->parameters()); }); });
}

TEST(WriteParameters, may_go_through_tensors_that_were_made_before) {
  expect_halved([](Trainer& trainer) {
    std::vector<torch::Tensor> others;
    for (const torch::Tensor& parameter : trainer.net->parameters()) others.push_back(parameter.detach().view({-1}));
    trainer.ddp.write_parameters([&] { halve(others); });
  });
}

TEST(WriteParameters, may_be_called_inside_another_one) {
  expect_halved([](Trainer& trainer) {
    trainer.ddp.write_parameters([&] {
      trainer.net->parameters()[0].mul_(0.25);
      trainer.ddp.write_parameters([&] { halve(trainer.net->parameters()); });
      trainer.net->parameters()[0].mul_(4);
    });
  });
}

TEST(WriteParameters, may_write_other_values_and_the_first_ones_again) {
  expect_halved([](Trainer& trainer) {
    trainer.ddp.write_parameters([&] {
      const auto kept = trainer.values();
      for (torch::Tensor& parameter : trainer.net->parameters()) parameter.fill_(9);
      trainer.world.barrier();
      for (size_t i = 0; i < kept.size(); ++i) trainer.net->parameters()[i].copy_(kept[i]);
      halve(trainer.net->parameters());
    });
  });
}

// Throws in the last rank's write_parameters(). Its shared parameters must have the values of before.
void fail_to_write(Trainer& trainer) {
  const auto before = trainer.values();
  try {
    trainer.ddp.write_parameters([&] {
      trainer.net->parameters()[1].fill_(9);
      if (trainer.world.rank() == trainer.world.size() - 1) throw std::runtime_error("a file that is not there");
    });
  } catch (const std::exception&) {
    const auto after = trainer.values();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(after[i], before[i]));
    throw;
  }
}

TEST(WriteParameters, that_throws_on_one_rank_changes_nothing_and_ends_the_others_by_name) {
  for (const Sharing sharing : kSharedInSomeWay) {
    const auto refused = errors(3, [&](World& world) {
      Trainer trainer(world, sharing);
      trainer.train(1);
      fail_to_write(trainer);
    });
    EXPECT_TRUE(contains(refused[2], "a file that is not there"));
    for (const int rank : {0, 1})
      EXPECT_TRUE(contains(refused[rank], "rank 2 failed: write_parameters() failed: a file that is not there"));
  }
}

TEST(WriteParameters, that_throws_on_the_only_rank_lets_it_go_on) {
  World single = World::single();
  Trainer trainer(single, Sharing::kShared);
  EXPECT_THROW(fail_to_write(trainer), std::runtime_error);
  EXPECT_NO_THROW(trainer.train(1));
}

TEST(WriteParameters, refuses_values_that_differ_and_names_parameter_and_ranks) {
  for (const Sharing sharing : kAnySharing) {
    const auto refused = errors(3, [&](World& world) {
      Trainer trainer(world, sharing);
      trainer.ddp.write_parameters([&] { trainer.net->parameters()[2].fill_(world.rank() == 1 ? 1 : 2); });
    });
    expect_refused(refused, "not the same on ranks 0, 2 and on ranks 1");
    for (const std::string& error : refused) EXPECT_TRUE(contains(error, "1.weight"));
  }
}

TEST(WriteParameters, on_one_rank_alone_is_refused_at_once) {
  for (const Sharing sharing : kSharedInSomeWay)
    expect_refused(errors(2,
                          [&](World& world) {
                            Trainer trainer(world, sharing);
                            trainer.train(1);
                            if (world.rank() == 0)
                              trainer.ddp.write_parameters([&] { halve(trainer.net->parameters()); });
                            trainer.train(1);
                          }),
                   sharing == Sharing::kShared ? "parameters_written()" : "all_gather");
}

TEST(WriteParameters, refuses_parameters_that_were_written_by_hand_before) {
  for (const Sharing sharing : kSharedInSomeWay)
    expect_refused(errors(2,
                          [&](World& world) {
                            Trainer trainer(world, sharing);
                            trainer.train(1);
                            {
                              const torch::NoGradGuard no_grad;
                              trainer.net->parameters()[0].mul_(0.5);
                            }
                            trainer.ddp.write_parameters([&] { trainer.net->parameters()[1].fill_(1); });
                          }),
                   "was written between two steps");
}

TEST(WriteParameters, refuses_a_write_through_a_pointer_that_was_taken_before) {
  for (const Sharing sharing : kSharedInSomeWay)
    expect_refused(errors(2,
                          [&](World& world) {
                            Trainer trainer(world, sharing);
                            auto* const bias = trainer.net->parameters()[1].data_ptr<float>();
                            trainer.ddp.write_parameters([&] {
                              world.barrier();
                              std::atomic_ref(bias[0]).store(7);  // both ranks
                              world.barrier();
                            });
                          }),
                   "through a pointer");
}

TEST(SeparateStep, refuses_a_parameter_that_one_rank_writes_once_more) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, Sharing::kSeparate);
    trainer.train(1);
    for (int i = 0; i <= world.rank(); ++i) {
      const torch::NoGradGuard no_grad;
      trainer.net->parameters()[0].mul_(0.5);
    }
    trainer.train(1);
  });
  expect_refused(refused, "parameters written since the last exchange, in place, is 5 on rank 0, 6 on rank 1");
}

TEST(SharedStep, refuses_clipping_of_what_no_sync_has_added) {
  const auto refused = errors(2, [](World& world) {
    Trainer trainer(world, Sharing::kShared);
    {
      const auto no_sync = trainer.ddp.no_sync();
      trainer.backward();
    }
    torch::nn::utils::clip_grad_norm_(trainer.net->parameters(), 1e-3);
    trainer.train(1);
  });
  expect_refused(refused, "was changed between backward() and step()");
}

}  // namespace
}  // namespace lockstep
