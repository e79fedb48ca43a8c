// SPDX-License-Identifier: Apache-2.0
// The training program of the tests of recovery: a small model with all that a replacement must take over beside the
// parameters, that is running means of a batch normalisation and random numbers of a dropout.
//
//   FRAGILE=exhausts_memory   rank 1 needs more memory than it may have, in each generation
//   FRAGILE=dies_at_once      rank 1 throws in its first forward pass, in each generation
//   FRAGILE=has_empty         the model of all ranks has a parameter without elements
#include <sys/resource.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>
#include <string>

#include "lockstep/lockstep.h"

namespace {

bool all_are_told(const std::string& how) {
  const char* const told = std::getenv("FRAGILE");
  return told != nullptr && how == told;
}

bool is_told(const std::string& how) {
  const char* const rank = std::getenv("RANK");
  return all_are_told(how) && rank != nullptr && std::string(rank) == "1";
}

// As under a limit of the system, but the others have as much as they like.
void exhaust_memory() {
  const rlimit little{.rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY};
  ::setrlimit(RLIMIT_DATA, &little);
  torch::zeros({1 << 26}).add_(1);
}

lockstep::ModulePtr make_model() {
  using namespace torch::nn;
  Sequential model(Linear(784, 48), BatchNorm1d(48), ReLU(), Dropout(0.3), Linear(48, 10));
  if (all_are_told("has_empty")) model->register_parameter("empty", torch::zeros({0}));
  return model.ptr();
}

torch::Tensor forward(torch::nn::Module& model, const torch::Tensor& data) {
  if (is_told("exhausts_memory")) exhaust_memory();
  if (is_told("dies_at_once")) throw lockstep::DataError({.what = "a bug in the program"});
  return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(data.flatten(1));
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run(argc, argv,
                       {.make_model = make_model,
                        .forward = forward,
                        .loss = [](const torch::Tensor& output,
                                   const torch::Tensor& target) { return torch::cross_entropy_loss(output, target); },
                        .correct = [](const torch::Tensor& output,
                                      const torch::Tensor& target) { return output.argmax(1).eq(target).sum(); },
                        .name = "fragile"});
}
