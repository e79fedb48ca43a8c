// SPDX-License-Identifier: Apache-2.0
// lockstep against PyTorch's DistributedDataParallel, recorded by make_ddp_reference.py.
#include <mutex>

#include "lockstep/checkpoint.h"
#include "lockstep/models.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"
#include "tests/reference/ramp.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::ramp;

constexpr int kSteps = 20;
constexpr int64_t kBatch = 10;
constexpr int64_t kStride = 97;

Task lenet_with_known_weights() {
  Task task = classification_task<LeNet>("lenet");
  task.make_model = [] {
    const torch::NoGradGuard no_grad;
    LeNet net;
    net->to(torch::kFloat64);
    int64_t i = 0;
    for (auto& parameter : net->parameters())
      parameter.copy_((ramp(parameter.numel(), i++) * 0.2).reshape(parameter.sizes()));
    return net.ptr();
  };
  return task;
}

Batch part_of_batch(int step, const World& world) {
  const torch::Tensor data = ramp(kBatch * 784, 1000 + step).reshape({kBatch, 1, 28, 28});
  const torch::Tensor target = (torch::arange(kBatch) * 3 + step).remainder(10);
  return testing::part_of({data, target}, world);
}

void expect_as_recorded(Strategy& strategy, const TensorFile& recorded) {
  int i = 0;
  for (const auto& parameter : strategy.model().parameters()) {
    const torch::Tensor values = parameter.detach().contiguous().flatten().slice(0, 0, parameter.numel(), kStride);
    const double norm = recorded.tensors.at("norm." + std::to_string(i)).item<double>();
    const double difference = (values - recorded.tensors.at("parameter." + std::to_string(i))).norm().item<double>();
    EXPECT_LE(difference, 1e-9 * norm) << "parameter " << i;
    EXPECT_NEAR(parameter.detach().norm().item<double>(), norm, 1e-9 * norm) << "parameter " << i;
    ++i;
  }
}

class AgainstPyTorch : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, AgainstPyTorch, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(AgainstPyTorch, ends_with_the_parameters_of_pytorchs_ddp) {
  const TensorFile recorded = load_safetensors(REFERENCE_FILE);
  run_ranks(GetParam(), [&](World& world) {
    const auto strategy = make_strategy(world, lenet_with_known_weights(),
                                        {.optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true}});
    for (int step = 0; step < kSteps; ++step) {
      const double loss = strategy->forward_backward(part_of_batch(step, world)).mean_loss;
      strategy->update();
      EXPECT_NEAR(loss, recorded.tensors.at("losses")[step].item<double>(), 1e-9) << "step " << step;
    }
    expect_as_recorded(*strategy, recorded);
  });
}

}  // namespace
}  // namespace lockstep
