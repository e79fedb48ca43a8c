// SPDX-License-Identifier: Apache-2.0
#include "lockstep/activation_checkpoint.h"

#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <memory>

#include "lockstep/ddp.h"
#include "lockstep/model/allocation_meter.h"
#include "lockstep/models.h"
#include "lockstep/optimizers.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;
using TensorList = std::vector<torch::Tensor>;

// A chain of layers with dropout, each in a checkpoint or not.
struct DeepImpl : torch::nn::Module {
  explicit DeepImpl(bool recompute, int depth = 4, int64_t width = 16, double dropout = 0.3)
      : recompute_(recompute), dropout_(dropout) {
    for (int i = 0; i < depth; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& layer : layers) {
      const auto run = [layer = layer.ptr(), dropout = dropout_](const torch::Tensor& in) {
        return torch::dropout(layer->forward(in).tanh() * in.sigmoid().exp(), dropout, /*train=*/true);
      };
      x = recompute_ ? checkpoint(run, x) : run(x);
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;

 private:
  bool recompute_;
  double dropout_;
};
TORCH_MODULE(Deep);

struct Outcome {
  TensorList outputs, gradients;
  torch::Tensor next_random;
};

// Forward and backward from one seed, of what `forward` makes of inputs that require gradients.
Outcome outcome_of(const std::function<TensorList(const TensorList&)>& forward, TensorList inputs,
                   const TensorList& parameters) {
  torch::manual_seed(3);
  for (torch::Tensor& input : inputs)
    if (input.is_floating_point()) input = input.detach().clone().requires_grad_();
  for (torch::Tensor parameter : parameters) parameter.mutable_grad() = torch::Tensor();
  Outcome outcome{.outputs = forward(inputs), .gradients = {}, .next_random = {}};
  torch::Tensor loss = torch::zeros({});
  for (const torch::Tensor& output : outcome.outputs)
    if (output.requires_grad()) loss = loss + output.square().sum();
  loss.backward();
  outcome.next_random = torch::rand({3});
  for (const torch::Tensor& each : inputs) outcome.gradients.push_back(each.grad());
  for (const torch::Tensor& each : parameters) outcome.gradients.push_back(each.grad());
  return outcome;
}

void expect_same_tensors(const TensorList& one, const TensorList& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    ASSERT_EQ(one[i].defined(), other[i].defined()) << i;
    EXPECT_TRUE(!one[i].defined() || torch::equal(one[i], other[i])) << i;
  }
}

void expect_same_with_checkpoint(const std::function<TensorList(const TensorList&)>& function, const TensorList& inputs,
                                 const TensorList& parameters) {
  const Outcome with = outcome_of([&](const TensorList& x) { return checkpoint(function, x); }, inputs, parameters);
  const Outcome without = outcome_of(function, inputs, parameters);
  expect_same_tensors(with.outputs, without.outputs);
  expect_same_tensors(with.gradients, without.gradients);
  EXPECT_TRUE(torch::equal(with.next_random, without.next_random));
}

TEST(Checkpoint, gives_the_bits_of_plain_autograd_with_dropout) {
  torch::nn::Linear layer(6, 6);
  expect_same_with_checkpoint(
      [&](const TensorList& x) { return TensorList{torch::dropout(layer->forward(x[0]).relu(), 0.5, true)}; },
      {torch::randn({5, 6})}, layer->parameters());
}

TEST(Checkpoint, takes_and_gives_several_tensors_of_all_kinds) {
  torch::nn::Linear layer(6, 6);
  const auto function = [&](const TensorList& x) {
    const torch::Tensor y = layer->forward(x[0]) * x[1];
    return TensorList{y, x[2] + 1, y.detach(), x[0], y.argmax(1)};
  };
  expect_same_with_checkpoint(function, {torch::randn({5, 6}), torch::randn({5, 6}), torch::arange(4)},
                              layer->parameters());
}

TEST(Checkpoint, can_be_in_another) {
  torch::nn::Linear inner(6, 6), outer(6, 6);
  TensorList parameters = inner->parameters();
  for (const torch::Tensor& each : outer->parameters()) parameters.push_back(each);
  const auto drop = [](const torch::Tensor& x) { return torch::dropout(x, 0.5, true); };
  const auto nested = [&](const TensorList& x) {
    const torch::Tensor y = checkpoint([&](const torch::Tensor& in) { return drop(inner->forward(in)); }, x[0]);
    return TensorList{drop(outer->forward(y.tanh()))};
  };
  const auto plain = [&](const TensorList& x) {
    return TensorList{drop(outer->forward(drop(inner->forward(x[0])).tanh()))};
  };
  const TensorList inputs = {torch::randn({5, 6})};
  const Outcome with = outcome_of([&](const TensorList& x) { return checkpoint(nested, x); }, inputs, parameters);
  expect_same_tensors(with.gradients, outcome_of(plain, inputs, parameters).gradients);
}

TEST(Checkpoint, gives_gradients_to_parameters_where_no_input_needs_one) {
  torch::nn::Linear layer(6, 6);
  const torch::Tensor data = torch::randn({5, 6});
  checkpoint([&](const torch::Tensor& x) { return layer->forward(x); }, data).sum().backward();
  EXPECT_TRUE(torch::allclose(layer->bias.grad(), torch::full({6}, 5.0)));
}

TEST(Checkpoint, works_with_torch_autograd_grad) {
  torch::nn::Linear layer(6, 6);
  const torch::Tensor x = torch::randn({5, 6}).requires_grad_();
  const auto run = [&](const torch::Tensor& in) { return layer->forward(in).tanh(); };
  const TensorList sources = {x, layer->weight};
  expect_same_tensors(torch::autograd::grad({checkpoint(run, x).sum()}, sources),
                      torch::autograd::grad({run(x).sum()}, sources));
  EXPECT_FALSE(layer->weight.grad().defined());
}

TEST(Checkpoint, sums_the_gradients_of_two_uses_of_a_parameter) {
  torch::nn::Linear layer(6, 6);
  const auto twice = [&](const TensorList& x) { return TensorList{layer->forward(layer->forward(x[0]).tanh())}; };
  expect_same_with_checkpoint(twice, {torch::randn({5, 6})}, layer->parameters());
}

TEST(Checkpoint, is_a_plain_call_without_gradients) {
  const torch::NoGradGuard no_grad;
  int calls = 0;
  checkpoint([&](const torch::Tensor& x) { return ++calls, x * 2; }, torch::ones({2}));
  EXPECT_EQ(calls, 1);
}

int64_t peak_of(bool recompute) {
  torch::manual_seed(1);
  Deep model(recompute, /*depth=*/24, /*width=*/32);
  const torch::Tensor data = torch::randn({2048, 32});
  const AllocationMeter meter;
  model->forward(data).sum().backward();
  return meter.most();
}

TEST(Checkpoint, needs_less_memory) { EXPECT_LT(2 * peak_of(true), peak_of(false)); }

TEST(Checkpoint, trains_with_ddp_to_the_bits_of_training_without_it) {
  const auto course = [](bool recompute) {
    TensorList parameters;
    run_ranks(2, [&](World& world) {
      const torch::Tensor data = torch::arange(80, torch::kFloat32).reshape({5, 16}).sin() + world.rank();
      Deep model(recompute, 4, 16, /*dropout=*/0);  // ranks that are threads share torch's generator
      {
        const torch::NoGradGuard no_grad;
        for (torch::Tensor& each : model->parameters())
          each.copy_(torch::linspace(-0.3, 0.3, each.numel()).view_as(each));
      }
      SGD optimizer(model->parameters(), {.lr = 0.1, .momentum = 0.9});
      DistributedDataParallel ddp(world, *model, optimizer);
      for (int step = 0; step < 3; ++step) {
        ddp.backward(model->forward(data).square().mean(), 5);
        optimizer.step();
        optimizer.zero_grad();
      }
      if (world.rank() == 0)
        for (const torch::Tensor& each : model->parameters()) parameters.push_back(each.detach().clone());
    });
    return parameters;
  };
  expect_same_tensors(course(true), course(false));
}

TEST(Checkpoint, trains_in_a_pipeline_with_dropout_to_the_bits_of_training_without_it) {
  const auto task = [](bool recompute) {
    Task made = small_task();
    made.stages = [recompute](torch::nn::Module& model) {
      auto pieces = pieces_of(dynamic_cast<torch::nn::SequentialImpl&>(model));
      for (Piece& piece : pieces) {
        const auto dropped = [forward = piece.forward](const Tensors& x) {
          return Tensors{torch::dropout(forward(x)[0], 0.2, true)};
        };
        piece.forward = [=](const Tensors& x) { return recompute ? checkpoint(dropped, x) : dropped(x); };
      }
      return pieces;
    };
    return made;
  };
  const StrategyOptions options{.kind = StrategyKind::kPipeline,
                                .optimizer = SGDOptions{.lr = 0.1},
                                .devices = 3,
                                .pipeline = {.stages = "0-1,2-4,5-6"}};
  expect_same_bits(course_of(task(true), options), course_of(task(false), options));
}

TEST(Checkpoint, of_all_pieces_trains_to_the_same_bits_in_every_strategy) {
  for (const StrategyInfo& info : strategies()) {
    SCOPED_TRACE(info.name);
    StrategyOptions options{.kind = info.kind,
                            .optimizer = SGDOptions{.lr = 0.1},
                            .devices = info.threads ? 2 : 1,
                            .pipeline = {.stages = "0-2,3-6"}};
    const Course without = course_of(small_task(), options);
    options.checkpoint_activations = true;
    expect_same_bits(course_of(small_task(), options), without);
  }
}

TEST(Checkpoint, of_all_pieces_runs_each_one_again) {
  const auto calls = std::make_shared<std::atomic<int>>(0);
  Task task = siamese_task();
  task.stages = [calls, stages = task.stages](torch::nn::Module& model) {
    std::vector<Piece> pieces = stages(model);
    for (Piece& piece : pieces)
      piece.forward = [calls, forward = piece.forward](const Tensors& inputs) {
        ++*calls;
        return forward(inputs);
      };
    return pieces;
  };
  StrategyOptions options{.kind = StrategyKind::kSingle, .optimizer = SGDOptions{.lr = 0.1}};
  const Course without = course_of(siamese_task(), options, 1);
  options.checkpoint_activations = true;
  expect_same_course(course_of(task, options, 1), without);
  EXPECT_EQ(*calls, 6 + 5);  // the first one splits the data, which needs no gradient
}

TEST(Checkpoint, of_all_pieces_needs_some) {
  Task task = small_task();
  task.make_model = [] { return torch::nn::Linear(6, 4).ptr(); };
  const StrategyOptions options{.kind = StrategyKind::kSingle, .checkpoint_activations = true};
  EXPECT_TRUE(contains(message_of<UsageError>([&] { strategy_of(task, options); }), "can't be cut into pieces"));
}

TEST(Checkpoint, refuses_what_it_can_not_do_right) {
  torch::nn::Linear layer(6, 6);
  const torch::Tensor x = torch::randn({5, 6}).requires_grad_();
  const auto refusal = [](const auto& call) { return message_of<UsageError>(call); };
  const torch::Tensor outside = layer->forward(x);
  EXPECT_TRUE(contains(refusal([&] { checkpoint([&](const torch::Tensor& in) { return in * outside; }, x); }),
                       "uses a tensor that was computed outside"));
  EXPECT_TRUE(contains(refusal([&] {
                         checkpoint([](const torch::Tensor& in) { return torch::Tensor(in).relu_(); },
                                    torch::randn({3}));
                       }),
                       "changes input 0 in place"));
  EXPECT_TRUE(contains(refusal([&] { checkpoint([](const torch::Tensor&) { return torch::Tensor(); }, x); }),
                       "output 0 of the function is undefined"));
  int calls = 0;
  const torch::Tensor other = checkpoint([&](const torch::Tensor& in) { return ++calls > 1 ? in.sum() : in * 2; }, x);
  EXPECT_TRUE(contains(refusal([&] { other.sum().backward(); }), "another shape for output 0"));
  const torch::Tensor again = checkpoint([](const torch::Tensor& in) { return in * in; }, x);
  EXPECT_TRUE(contains(refusal([&] { torch::autograd::grad({again.sum()}, {x}, {}, true, /*create_graph=*/true); }),
                       "create_graph through checkpoint()"));
}

}  // namespace
}  // namespace lockstep
