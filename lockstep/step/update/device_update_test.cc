// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/update/device_update.h"

#include <gtest/gtest.h>

#include <limits>

#include "lockstep/optimizers.h"

namespace lockstep {
namespace {

constexpr double kDecay = 0.9;
constexpr double kLossScale = 8;

// The same parameters twice: for the pass over flat memory and for libtorch's kernels, which exist on the CPU, too.
class DeviceUpdateOf : public ::testing::TestWithParam<OptimizerOptions> {
 protected:
  static std::vector<torch::Tensor> parameters(torch::ScalarType dtype = torch::kFloat64) {
    torch::manual_seed(3);
    std::vector<torch::Tensor> made = {torch::randn({5, 3}, dtype), torch::randn({7}, dtype),
                                       torch::randn({4, 3, 3, 3}, dtype).contiguous(torch::MemoryFormat::ChannelsLast)};
    for (torch::Tensor& each : made) each.set_requires_grad(true);
    return made;
  }

  // The second one never has a gradient.
  static void set_gradients_of(const std::vector<torch::Tensor>& of, int step) {
    torch::manual_seed(100 + step);
    for (const size_t i : {0, 2}) of[i].mutable_grad() = kLossScale * torch::randn_like(of[i].detach());
  }

  static OptimizerState state_for(const std::vector<torch::Tensor>& of, const UpdateRule& rule) {
    OptimizerState state{
        .parameters = of, .group_of = {0, 0, 0}, .steps = {0, 0, 0}, .arrays = {}, .ema_decay = kDecay};
    state.arrays.resize(rule.state_names().size());
    return state;
  }

  void expect_the_same_steps(torch::ScalarType dtype, double tolerance) {
    const torch::NoGradGuard no_grad;
    const auto flat = parameters(dtype), whole = parameters(dtype);
    const ClippingOptions clipping{.max_norm = 3, .max_value = 0.2};
    const auto optimizer = make_optimizer(flat, GetParam());
    optimizer->set_clipping(clipping);
    optimizer->keep_average(kDecay);
    optimizer->set_loss_scale(kLossScale);
    OptimizerState state = state_for(whole, *rule_);
    DeviceUpdate update(state);
    for (int step = 0; step < 5; ++step) {
      set_gradients_of(flat, step);
      set_gradients_of(whole, step);
      optimizer->step();
      EXPECT_TRUE(update.run(*rule_, optimizer->param_groups(), clipping, kLossScale));
      EXPECT_NEAR(update.gradient_norm(), optimizer->gradient_norm(), 1e-4 * optimizer->gradient_norm());
      for (const size_t i : {0, 1, 2})
        EXPECT_TRUE(torch::allclose(whole[i], flat[i], tolerance, tolerance)) << "parameter " << i << ", step " << step;
      for (const size_t i : {0, 2})
        EXPECT_TRUE(torch::allclose(state.averages[i], optimizer->state_of(flat[i]).at("ema"), tolerance, tolerance));
    }
    EXPECT_EQ(state.steps, (std::vector<int64_t>{5, 0, 5}));
  }

  std::unique_ptr<UpdateRule> rule_ = std::visit([](const auto& options) { return rule_of(options); }, GetParam());
};
INSTANTIATE_TEST_SUITE_P(
    Rules, DeviceUpdateOf,
    ::testing::Values(OptimizerOptions(SGDOptions{.lr = 0.1}),
                      OptimizerOptions(SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01}),
                      OptimizerOptions(AdamOptions{.lr = 0.01, .weight_decay = 0.01}),
                      OptimizerOptions(AdamWOptions{.lr = 0.01}), OptimizerOptions(LAMBOptions{.lr = 0.01}),
                      OptimizerOptions(LARSOptions{.lr = 0.1}),
                      OptimizerOptions(RMSpropOptions{.lr = 0.01, .weight_decay = 0.01, .momentum = 0.9}),
                      OptimizerOptions(RMSpropOptions{.lr = 0.01}),
                      OptimizerOptions(AdagradOptions{.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.01})));

TEST_P(DeviceUpdateOf, updates_as_the_flat_pass_does) { expect_the_same_steps(torch::kFloat64, 1e-9); }

// A float32 original of each parameter is updated.
TEST_P(DeviceUpdateOf, updates_parameters_of_16_bits) { expect_the_same_steps(torch::kBFloat16, 2e-2); }

TEST_P(DeviceUpdateOf, skips_a_step_with_an_overflow) {
  const torch::NoGradGuard no_grad;
  const auto whole = parameters();
  const auto before = whole[0].detach().clone();
  const auto groups = make_optimizer(whole, GetParam());
  OptimizerState state = state_for(whole, *rule_);
  DeviceUpdate update(state);
  set_gradients_of(whole, 0);
  whole[0].mutable_grad().view(-1)[0] = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(update.run(*rule_, groups->param_groups(), {}, kLossScale));
  EXPECT_TRUE(torch::equal(whole[0], before));
  EXPECT_EQ(state.steps[0], 0);
}

}  // namespace
}  // namespace lockstep
