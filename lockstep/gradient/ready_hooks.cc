// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/ready_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep {
namespace {

class ReadyHook : public torch::autograd::FunctionPostHook {
 public:
  explicit ReadyHook(std::function<void()> ready) : ready_(std::move(ready)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ready_();
    return outputs;
  }

 private:
  std::function<void()> ready_;
};

}  // namespace

void ReadyHooks::add(const torch::Tensor& parameter, std::function<void()> ready) {
  auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
  const std::uintptr_t key = accumulator->add_post_hook(std::make_unique<ReadyHook>(std::move(ready)));
  hooks_.emplace_back(std::move(accumulator), key);
}

void ReadyHooks::clear() {
  for (const auto& [accumulator, key] : hooks_) accumulator->del_post_hook(key);
  hooks_.clear();
}

}  // namespace lockstep
