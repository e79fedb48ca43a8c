// SPDX-License-Identifier: Apache-2.0
// Which parameters a DistributedDataParallel takes, and where they are.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "lockstep/ddp.h"
#include "lockstep/optimizers.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

TEST(Ddp, gives_every_rank_the_parameters_and_buffers_of_rank_0) {
  run_ranks(3, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    {
      const torch::NoGradGuard no_grad;
      for (auto& tensor : net->parameters()) tensor.fill_(world.rank() + 1);
      for (auto& tensor : net->buffers()) tensor.fill_(world.rank() + 1);
    }
    const DistributedDataParallel ddp(world, *net);
    for (const auto& tensor : net->parameters()) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
    for (const auto& tensor : net->buffers()) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
  });
}

TEST(Ddp, names_a_parameter_that_only_one_rank_has_frozen) {
  const auto freeze_on_rank_1 = [](World& world) {
    torch::nn::Linear net(3, 4);
    net->bias.set_requires_grad(world.rank() != 1);
    DistributedDataParallel(world, *net);
  };
  EXPECT_TRUE(contains(message_of<MismatchError>([&] { run_ranks(2, freeze_on_rank_1); }), "trained on rank 0, bias"));
}

TEST(Ddp, leaves_frozen_parameters_out) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
    for (auto& parameter : net->parameters()) parameter.set_requires_grad(parameter.size(0) == 1);
    DistributedDataParallel ddp(world, *net);
    ddp.backward(net->forward(torch::ones({1, 2})).sum(), 1);
    EXPECT_FALSE(net->parameters()[0].grad().defined());
    EXPECT_TRUE(net->parameters()[2].grad().defined());
  });
}

TEST(Ddp, names_the_tensor_in_which_models_differ_before_any_is_sent) {
  const auto with_odd_rank_1 = [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::Linear(4, world.rank() == 1 ? 6 : 5));
    DistributedDataParallel(world, *net);
  };
  const std::string message = message_of<MismatchError>([&] { run_ranks(3, with_odd_rank_1); });
  EXPECT_TRUE(contains(message, "rank 0 and rank 1 differ at tensor 2: 1.weight float[5, 4]"));
  EXPECT_TRUE(contains(message, "1.weight float[6, 4]"));
}

TEST(Ddp, names_a_model_that_lacks_a_parameter) {
  const auto with_small_rank_0 = [](World& world) {
    torch::nn::Linear net(torch::nn::LinearOptions(3, 4).bias(world.rank() == 1));
    DistributedDataParallel(world, *net);
  };
  EXPECT_TRUE(contains(message_of<MismatchError>([&] { run_ranks(2, with_small_rank_0); }),
                       "(no such tensor) on rank 0, bias float[4]"));
}

TEST(Ddp, refuses_an_optimizer_of_another_model) {
  torch::nn::Linear net(2, 1), other(2, 1);
  SGD sgd(other->parameters(), {.lr = 1});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { DistributedDataParallel(World::single(), *net, sgd); }),
                       "not a parameter of the module"));
}

TEST(Ddp, leaves_alone_what_it_is_told_to_ignore) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
    {
      const torch::NoGradGuard no_grad;
      for (torch::Tensor& p : net->parameters()) p.fill_(world.rank() + 1);
      for (torch::Tensor& b : net->buffers()) b.fill_(world.rank() + 1);
    }
    DistributedDataParallel ddp(world, *net, {.ignored = {"0.weight", "1.running_mean"}});
    EXPECT_EQ(net->named_parameters()["0.weight"][0][0].item<float>(), static_cast<float>(world.rank() + 1));
    EXPECT_EQ(net->named_parameters()["0.bias"][0].item<float>(), 1.0F);
    EXPECT_EQ(net->named_buffers()["1.running_mean"][0].item<float>(), static_cast<float>(world.rank() + 1));
    EXPECT_EQ(net->named_buffers()["1.running_var"][0].item<float>(), 1.0F);
    const torch::Tensor weight = net->named_parameters()["0.weight"], bias = net->named_parameters()["1.bias"];
    ddp.backward(weight.sum() * world.rank() + bias.sum() * world.rank() * 2, 1);
    EXPECT_EQ(weight.grad()[0][0].item<float>(), static_cast<float>(world.rank())) << "its own";
    EXPECT_EQ(bias.grad()[0].item<float>(), 1.0F) << "the mean";
  });
}

TEST(Ddp, names_what_is_ignored_and_can_not_be) {
  torch::nn::Linear net(2, 1);
  SGD sgd(net->parameters(), {.lr = 1});
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { DistributedDataParallel(World::single(), *net, sgd, {.ignored = {"weigth"}}); }),
      "no parameter or buffer weigth"));
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { DistributedDataParallel(World::single(), *net, sgd, {.ignored = {"bias"}}); }),
      "bias is ignored, but the optimizer"));
}

// Two linear layers that share a weight, a frozen one, an empty one, and one in another dtype.
struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    first = register_module("first", torch::nn::Linear(4, 4));
    tied = register_parameter("tied", first->weight);
    frozen = register_parameter("frozen", torch::full({4}, 2.0F), /*requires_grad=*/false);
    empty = register_parameter("empty", torch::empty({0, 3}));
    wide = register_parameter("wide", torch::ones({4}, torch::kFloat64));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return (torch::linear(first(x), tied) * frozen).to(torch::kFloat64) * wide;
  }
  torch::nn::Linear first{nullptr};
  torch::Tensor tied, frozen, empty, wide;
};
TORCH_MODULE(TiedNet);

TEST(Ddp, keeps_one_copy_of_all_parameters_for_the_ranks_of_a_machine) {
  std::vector<const void*> places(3);
  run_ranks(3, [&](World& world) {
    TiedNet net;
    SGD sgd(net->parameters(), {.lr = 0.5});
    DistributedDataParallel ddp(world, *net, sgd);
    places[world.rank()] = net->tied.const_data_ptr();
    ddp.backward(net->forward(torch::ones({2, 4})).sum(), 2);
    sgd.step();
    EXPECT_EQ(net->tied.const_data_ptr(), net->first->weight.const_data_ptr());
    EXPECT_TRUE(torch::equal(net->frozen, torch::full({4}, 2.0F)));
    EXPECT_FALSE(torch::equal(net->wide.detach(), torch::ones({4}, torch::kFloat64)));
    EXPECT_EQ(net->empty.numel(), 0);
    world.barrier();
  });
  EXPECT_EQ(places[0], places[1]);
  EXPECT_EQ(places[0], places[2]);
}

// A step of a mean gradient of 2 moves the weight of 0.5 by -2.
void train_shared(World& world, torch::nn::Linear& net, DistributedDataParallel& ddp, SGD& sgd) {
  ddp.backward(net->forward(torch::full({1, 1}, 2.0F)).sum(), 1);
  sgd.step();
  EXPECT_EQ(net->weight.item<float>(), -1.5F);
  world.barrier();
}

torch::nn::Linear one_weight() {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  const torch::NoGradGuard no_grad;
  net->weight.fill_(0.5);
  return net;
}

TEST(Ddp, leaves_each_rank_parameters_of_its_own) {
  run_ranks(3, [](World& world) {
    torch::nn::Linear net = one_weight();
    SGD sgd(net->parameters(), {.lr = 1});
    {
      DistributedDataParallel ddp(world, *net, sgd);
      train_shared(world, net, ddp, sgd);
    }
    world.barrier();
    const torch::NoGradGuard no_grad;
    if (world.rank() == 1) net->weight.zero_();
    world.barrier();
    EXPECT_EQ(net->weight.item<float>(), world.rank() == 1 ? 0.0F : -1.5F) << world.rank();
  });
}

TEST(Ddp, takes_parameters_out_of_what_another_shares) {
  run_ranks(2, [](World& world) {
    torch::nn::Linear net = one_weight();
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel first(world, *net, sgd);
    train_shared(world, net, first, sgd);
    torch::optim::Adam other(net->parameters(), 1);  // its first step moves the weight by -1
    DistributedDataParallel second(world, *net, other);
    other.zero_grad();
    second.backward(net->forward(torch::full({1, 1}, 2.0F)).sum(), 1);
    other.step();
    world.barrier();
    EXPECT_NEAR(net->weight.item<float>(), -2.5F, 1e-4) << world.rank();
    EXPECT_THROW(first.backward(net->forward(torch::full({1, 1}, 2.0F)).sum(), 1), UsageError);
  });
}

TEST(Ddp, works_on_a_module_without_parameters) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net{torch::nn::Flatten()};
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel ddp(world, *net, sgd);
    const torch::Tensor input = torch::ones({2, 3}).set_requires_grad(true);
    ddp.backward(net->forward(input).sum(), 2);
    sgd.step();
    EXPECT_EQ(ddp.last_batch().samples, 4);
    EXPECT_TRUE(torch::equal(input.grad(), torch::ones({2, 3})));
  });
}

// A write that breaks shared parameters is an error that names them.
template <class Break>
std::string after(Break do_break) {
  return message_of<UsageError>([&] {
    torch::nn::Linear net(2, 1);
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel ddp(World::single(), *net, sgd);
    do_break(net, ddp);
    ddp.backward(net->forward(torch::ones({1, 2}, net->weight.dtype())).sum(), 1);
    sgd.step();
  });
}

TEST(Ddp, names_a_parameter_that_was_written_by_hand) {
  const std::string message = after([](torch::nn::Linear& net, DistributedDataParallel&) {
    const torch::NoGradGuard no_grad;
    net->bias.mul_(0.5);
  });
  EXPECT_TRUE(contains(message, "parameter bias was written between two steps"));
  EXPECT_TRUE(contains(message, "share_parameters = false"));
}

TEST(Ddp, names_a_parameter_that_left_the_block) {
  const std::string message = after([](torch::nn::Linear& net, DistributedDataParallel&) { net->to(torch::kFloat64); });
  EXPECT_TRUE(contains(message, "parameter weight has left the memory"));
}

TEST(Ddp, accepts_parameters_that_every_rank_wrote_alike) {
  run_ranks(2, [](World& world) {
    torch::nn::Linear net(2, 1);
    SGD sgd(net->parameters(), {.lr = 1});
    DistributedDataParallel ddp(world, *net, sgd);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(3);
    }
    ddp.parameters_written();
    ddp.backward(net->forward(torch::ones({1, 2})).sum(), 1);
    sgd.step();
    EXPECT_TRUE(torch::equal(net->weight.detach(), torch::full({1, 2}, 2.0F)));
    world.barrier();
  });
}

TEST(Ddp, fails_a_graph_that_was_made_before_the_step) {
  torch::nn::Linear net(2, 2);
  SGD sgd(net->parameters(), {.lr = 1});
  DistributedDataParallel ddp(World::single(), *net, sgd);
  const torch::Tensor input = torch::ones({1, 2}).set_requires_grad(true);
  const torch::Tensor old = net->forward(net->forward(input)).sum();
  ddp.backward(net->forward(input).sum(), 1);
  sgd.step();
  EXPECT_ANY_THROW(old.backward());
}

}  // namespace
}  // namespace lockstep
