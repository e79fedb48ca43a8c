// SPDX-License-Identifier: Apache-2.0
// tests/step_programs.h: small programs over the API of a training step, run on ranks that are threads: each must end with
// an error on every rank that names the cause, or give what one rank gives.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/ddp.h"
#include "lockstep/optimizers.h"
#include "tests/support.h"
#include "tests/worlds.h"

namespace lockstep::testing {

// How the gradients get from rank to rank, and whether the ranks share one copy of the parameters.
enum class Sharing { kShared, kSharedThroughBuckets, kSeparate };

inline std::string name_of(Sharing sharing) {
  const std::vector<std::string> names{"shared", "shared_through_buckets", "separate"};
  return names[static_cast<size_t>(sharing)];
}

inline DistributedDataParallelOptions options_of(Sharing sharing) {
  return {.share_parameters = sharing != Sharing::kSeparate, .mean_in_grad = sharing == Sharing::kSharedThroughBuckets};
}

// Some numbers between -1 and 1. Ranks are threads here, which share torch's generator.
inline torch::Tensor numbers(torch::IntArrayRef shape, int seed) {
  const int64_t count = c10::multiply_integers(shape);
  return torch::sin(torch::arange(count, torch::kFloat32) * 1.7 + seed).view(shape);
}

inline void set_numbers(const std::vector<torch::Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i)
    torch::Tensor(parameters[i]).copy_(numbers(parameters[i].sizes(), static_cast<int>(i)));
}

// One rank's model, optimizer and DistributedDataParallel. The loss is the mean of the outputs, for inputs of ones.
struct Trainer {
  Trainer(World& all, Sharing sharing, const SGDOptions& options = {.lr = 0.1})
      : world(all), sgd(net->parameters(), options), ddp(world, *net, sgd, options_of(sharing)) {}

  void backward(int samples = 4) {
    if (samples == 0) return ddp.backward({}, 0);
    ddp.backward(net->forward(torch::ones({samples, 3})).mean(), samples);
  }
  void plain_backward() { net->forward(torch::ones({4, 3})).mean().backward(); }
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

// Runs `program` on every rank and returns what each threw, "" for nothing. machines: of each rank.
template <class Program>
IntVector<std::string> errors_on(const Nodes& machines, const Program& program,
                                 std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  IntVector<std::string> errors(static_cast<int>(machines.size()));
  std::mutex mutex;
  const auto body = [&](World& world) {
    try {
      program(world);
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex);
      errors[world.rank()] = error.what();
      throw;
    }
  };
  try {
    if (std::ranges::max(machines) == 0)
      run_ranks(errors.size(), body, {.timeout = timeout});
    else
      run_over_machines(machines, body, {.timeout = timeout});
  } catch (const std::exception&) {  // noted above
  }
  return errors;
}

template <class Program>
IntVector<std::string> errors(int ranks, const Program& program) {
  return errors_on(Nodes(static_cast<size_t>(ranks)), program);
}

// Every rank threw, and at least one names the cause.
inline void expect_refused(const IntVector<std::string>& errors, const std::string& cause) {
  bool named = false;
  std::string all;
  for (int rank = 0; rank < errors.size(); ++rank) {
    EXPECT_NE(errors[rank], "") << "rank " << rank << " went on";
    named = named || contains(errors[rank], cause);
    all += errors[rank] + "\n";
  }
  EXPECT_TRUE(named) << "no \"" << cause << "\" in:\n" << all;
}

// Every one of these programs is tried in each way.
class EachSharing : public ::testing::TestWithParam<Sharing> {};
inline auto all_sharings() {
  return ::testing::Values(Sharing::kShared, Sharing::kSharedThroughBuckets, Sharing::kSeparate);
}

}  // namespace lockstep::testing
