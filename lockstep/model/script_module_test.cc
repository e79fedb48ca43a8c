// SPDX-License-Identifier: Apache-2.0
#include "lockstep/script_module.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>

#include "lockstep/models.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

// The file of a model: outer.weight times what inner gives, which is x times inner.weight, halved in evaluation.
std::string script_file() {
  torch::jit::Module inner("inner"), outer("outer");
  inner.register_parameter("weight", torch::full({2, 3}, 0.5).requires_grad_(), false);
  inner.register_buffer("seen", torch::zeros({1}));
  inner.register_attribute("training", c10::BoolType::get(), true);
  inner.define("def forward(self, x):\n  y = x.matmul(self.weight.t())\n  return y if self.training else y / 2\n");
  outer.register_parameter("weight", torch::full({2}, 3.0).requires_grad_(), false);
  outer.register_parameter("frozen", torch::ones({2}), false);
  outer.register_module("inner", inner);
  outer.register_attribute("training", c10::BoolType::get(), true);
  outer.define("def forward(self, x):\n  return self.inner.forward(x) * self.weight\n");
  const std::string file = (std::filesystem::path(::testing::TempDir()) / "script_module_test.pt").string();
  outer.save(file);
  return file;
}

TEST(ScriptModule, has_the_parameters_of_the_script_and_trains_them) {
  ScriptModule net(script_file());
  const auto named = net->named_parameters();
  ASSERT_EQ(named.keys(), (std::vector<std::string>{"weight", "frozen", "inner.weight"}));
  EXPECT_FALSE(named["frozen"].requires_grad());
  EXPECT_EQ(net->named_buffers().keys(), std::vector<std::string>{"inner.seen"});
  const auto x = torch::ones({4, 3});
  EXPECT_TRUE(torch::equal(net->forward(x), torch::full({4, 2}, 4.5)));
  net->forward(x).sum().backward();
  EXPECT_TRUE(torch::equal(named["weight"].grad(), torch::full({2}, 6.0)));
  EXPECT_TRUE(torch::equal(named["inner.weight"].grad(), torch::full({2, 3}, 12.0)));
  const torch::NoGradGuard no_grad;
  torch::Tensor(named["inner.weight"]).set_data(torch::ones({2, 3}));  // as for memory that ranks share
  EXPECT_TRUE(torch::equal(net->forward(x), torch::full({4, 2}, 9.0)));
  net->eval();
  EXPECT_TRUE(torch::equal(net->forward(x), torch::full({4, 2}, 4.5)));
}

TEST(ScriptModule, is_in_the_mode_in_which_it_was_saved) {
  auto script = torch::jit::load(script_file());
  script.eval();
  ScriptModule net(script);
  EXPECT_FALSE(net->is_training());
  EXPECT_TRUE(torch::equal(net->forward(torch::ones({1, 3})), torch::full({1, 2}, 2.25)));
}

TEST(ScriptModule, is_a_task_for_the_samples_of_the_data) {
  const Task task = model_task(script_file());
  EXPECT_EQ(task.name, "script_module_test");
  const ModulePtr model = task.make_model();
  const torch::Tensor output = task.forward(*model, torch::ones({4, 3}));  // 4.5 for both classes
  const Task classes = task.fit({.sizes = {3}, .classes = 2});
  EXPECT_NEAR(classes.loss(output, torch::tensor({0, 1, 1, 0})).item<double>(), std::log(2.0), 1e-6);
  EXPECT_EQ(classes.correct(torch::eye(2), torch::tensor({0, 0})).item<double>(), 1);
  const Task numbers = task.fit({.sizes = {3}, .numbers = 2});
  EXPECT_EQ(numbers.loss(output, torch::full({4, 2}, 4.F)).item<double>(), 0.25);
  EXPECT_FALSE(numbers.correct);
}

TEST(ScriptModule, refuses_a_script_that_replaces_its_buffer) {
  torch::jit::Module script("counting");
  script.register_buffer("seen", torch::zeros({1}));
  script.define("def forward(self, x):\n  self.seen = self.seen + 1\n  return x\n");
  ScriptModule net(script);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { net->forward(torch::ones({1})); }), "replaced its buffer seen"));
}

}  // namespace
}  // namespace lockstep
