// SPDX-License-Identifier: Apache-2.0
// tests/strategies.h: what the tests of the strategies share: a small task in float64, and courses to compare.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/collective/gpus.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"

namespace lockstep::testing {

inline constexpr int64_t kBatch = 10;  // 3 and 4 do not divide it
inline constexpr int kSteps = 20;

// 6 -> 8 -> 7 -> 5 -> 4, float64: seven modules to cut between.
inline Task small_task() {
  return {.make_model =
              [] {
                torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 7),
                                          torch::nn::Tanh(), torch::nn::Linear(7, 5), torch::nn::Tanh(),
                                          torch::nn::Linear(5, 4));
                net->to(torch::kFloat64);
                return net.ptr();
              },
          .forward =
              [](torch::nn::Module& model, const torch::Tensor& data) {
                return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(data);
              },
          .loss = [](const torch::Tensor& output,
                     const torch::Tensor& target) { return torch::cross_entropy_loss(output, target); },
          .correct = [](const torch::Tensor& output,
                        const torch::Tensor& target) { return output.argmax(1).eq(target).sum(); },
          .name = "small"};
}

// As small_task(), with a layer that has two places in it.
inline Task tied_task() {
  Task task = small_task();
  task.make_model = [] {
    const torch::nn::Linear twice(8, 8);
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), twice, torch::nn::Tanh(), twice,
                              torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 4));
    net->to(torch::kFloat64);
    return net.ptr();
  };
  task.name = "tied";
  return task;
}

// A Siamese network: both halves of a sample go through the same two layers, and meet in a third one that has their
// difference and their product. Six pieces; every cut but those at the ends is inside the branches.
struct SiameseImpl : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(3, 5))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(5, 5))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(10, 4))};

  std::vector<Piece> pieces() {
    const auto layer = [](const std::string& name, const torch::nn::Linear& linear) {
      return make_piece(name, {linear.ptr().get()},
                        [impl = linear.ptr()](const torch::Tensor& x) { return impl->forward(x).tanh(); });
    };
    const auto split = [](const Tensors& x) { return x[0].chunk(2, 1); };
    const auto meet = [impl = head.ptr()](const Tensors& x) {
      return Tensors{impl->forward(torch::cat({(x[0] - x[1]).abs(), x[0] * x[1]}, 1))};
    };
    return {{"split", {}, split},
            on_tensor(0, layer("a.first", first)),
            on_tensor(0, layer("a.second", second)),
            on_tensor(1, layer("b.first", first)),
            on_tensor(1, layer("b.second", second)),
            {"meet", {head.ptr().get()}, meet}};
  }
};

inline Task siamese_task() {
  Task task = small_task();
  task.make_model = [] {
    const auto net = std::make_shared<SiameseImpl>();
    net->to(torch::kFloat64);
    return net;
  };
  task.stages = [](torch::nn::Module& model) { return dynamic_cast<SiameseImpl&>(model).pieces(); };
  task.forward = [stages = task.stages](torch::nn::Module& model, const torch::Tensor& data) {
    return run_pieces(stages(model), data);
  };
  task.name = "siamese";
  return task;
}

inline Task in_float64(Task task) {
  task.make_model = [make = task.make_model] {
    auto model = make();
    model->to(torch::kFloat64);
    return model;
  };
  return task;
}

inline StrategyOptions on_one(StrategyOptions options) {
  options.kind = StrategyKind::kSingle;
  return options;
}

inline Batch batch_of(int step, int64_t samples = kBatch) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 + step));
  return {torch::randn({samples, 6}, generator, torch::TensorOptions().dtype(torch::kFloat64)),
          torch::randint(0, 4, {samples}, generator, torch::kInt64)};
}

// `keep` says which numbers of a sample count, `weight` how much the sample counts in the loss.
inline Task weighted_task() {
  Task task = small_task();
  task.forward = [](torch::nn::Module& model, const Batch& batch) {
    return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(batch.data * batch["keep"]);
  };
  task.loss = [](const torch::Tensor& output, const Batch& batch) {
    const torch::Tensor of_samples = torch::cross_entropy_loss(output, batch.target, {}, at::Reduction::None);
    return (of_samples * batch["weight"]).mean();
  };
  task.stages = [](torch::nn::Module& model) {
    std::vector<Piece> pieces = pieces_of(dynamic_cast<torch::nn::SequentialImpl&>(model));
    pieces.insert(pieces.begin(), {"keep", {}, [](const Tensors& x) { return Tensors{x[0] * x[1]}; }});
    return pieces;
  };
  const auto weight_of_right = [](const torch::Tensor& output, const Batch& batch) {
    return (output.argmax(1).eq(batch.target) * batch["weight"]).sum();
  };
  task.metrics.push_back({.name = "weight_of_right", .sum = weight_of_right});
  return task;
}

inline Batch weighted_batch(int step) {
  Batch batch = batch_of(step);
  const torch::Tensor numbers = torch::arange(kBatch * 6).view({kBatch, 6}) + step;
  batch.more = {{"keep", numbers.remainder(5).ne(0)}, {"weight", numbers.select(1, 0).to(torch::kFloat64) / 10}};
  return batch;
}

// The mean over what `weight` counts: NaN where that is nothing.
inline Task counted_task() {
  Task task = weighted_task();
  task.loss = [](const torch::Tensor& output, const Batch& batch) {
    const torch::Tensor of_samples = torch::cross_entropy_loss(output, batch.target, {}, at::Reduction::None);
    return (of_samples * batch["weight"]).sum() / batch["weight"].sum();
  };
  task.samples = [](const Batch& batch) { return batch["weight"].sum().item<int64_t>(); };
  return task;
}

// Half of the samples count nothing, and in step 3 all of them; the others count 1 to 4.
inline Batch counted_batch(int step) {
  Batch batch = weighted_batch(step);
  const torch::Tensor rows = torch::arange(kBatch);
  const torch::Tensor counts = step % 2 == 0 ? rows.ge(kBatch / 2) : rows.lt(kBatch / 2);
  batch.more["weight"] = ((rows.remainder(4) + 1) * counts * (step != 3)).to(torch::kFloat64);
  return batch;
}

// A rank's part of the global batch, as the loader cuts it.
inline Batch part_of(const Batch& batch, const World& world) {
  const Range mine = even_part(batch.size(), world.rank(), world.size());
  return batch.rows(mine.begin, mine.end);
}

// The same where some ranks train on nothing; `workers`: those that do.
inline Batch part_of(const Batch& batch, const Strategy& strategy, const World& workers) {
  if (strategy.ranks(workers).has_data) return part_of(batch, workers);
  return batch.rows(0, 0);
}

// What comes out of a few steps of training.
struct Course {
  std::vector<torch::Tensor> parameters;
  std::vector<double> losses;  // of each step
};

inline std::vector<torch::Tensor> values_of(torch::nn::Module& model) {
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : model.parameters()) values.push_back(parameter.detach().cpu().clone());
  return values;
}

inline Course course_of(Strategy& strategy, int steps = kSteps, int64_t samples = kBatch) {
  Course course;
  for (int step = 0; step < steps; ++step) {
    course.losses.push_back(strategy.forward_backward(batch_of(step, samples)).mean_loss);
    strategy.update();
  }
  strategy.synchronise();
  course.parameters = values_of(strategy.model());
  return course;
}

// With LOCKSTEP_TEST_DEVICES=cuda in the environment, devices are GPUs: those that there are, in turn.
inline bool on_gpus() {
  const char* told = std::getenv("LOCKSTEP_TEST_DEVICES");
  return told != nullptr && std::string(told) == "cuda";
}

inline std::vector<DevicePlace> test_places(int devices) {
  if (!on_gpus()) return {};
  const int gpus = cuda_device_count();
  std::vector<DevicePlace> places;
  for (int i = 0; i < devices; ++i)
    places.push_back({.device = {torch::kCUDA, static_cast<c10::DeviceIndex>(gpus > 0 ? i % gpus : i)}});
  return places;
}

// A strategy of one process.
inline std::unique_ptr<Strategy> strategy_of(const Task& task, StrategyOptions options) {
  options.places = test_places(options.devices);
  return make_strategy(World::single(), task, options);
}

inline Course course_of(const Task& task, const StrategyOptions& options, int steps = kSteps,
                        int64_t samples = kBatch) {
  return course_of(*strategy_of(task, options), steps, samples);
}

inline Course on_one_device(const Task& task, StrategyOptions options, int steps = kSteps, int64_t samples = kBatch) {
  options.kind = StrategyKind::kSingle;
  options.devices = 1;
  return course_of(*make_strategy(World::single(), task, options), steps, samples);
}

// Each tensor within `tolerance` of its norm, each loss within it.
inline void expect_same_course(const Course& one, const Course& other, double tolerance = 1e-9) {
  ASSERT_EQ(one.parameters.size(), other.parameters.size());
  for (size_t i = 0; i < one.parameters.size(); ++i) {
    const double difference = (one.parameters[i] - other.parameters[i]).norm().item<double>();
    EXPECT_LE(difference, tolerance * other.parameters[i].norm().item<double>()) << "parameter " << i;
  }
  ASSERT_EQ(one.losses.size(), other.losses.size());
  for (size_t i = 0; i < one.losses.size(); ++i)
    EXPECT_NEAR(one.losses[i], other.losses[i], tolerance * std::abs(other.losses[i])) << "step " << i;
}

inline void expect_same_bits(const Course& one, const Course& other) {
  ASSERT_EQ(one.parameters.size(), other.parameters.size());
  for (size_t i = 0; i < one.parameters.size(); ++i)
    EXPECT_TRUE(torch::equal(one.parameters[i], other.parameters[i])) << "parameter " << i;
  EXPECT_EQ(one.losses, other.losses);
}

}  // namespace lockstep::testing
