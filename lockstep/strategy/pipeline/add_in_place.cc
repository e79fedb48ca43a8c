// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/add_in_place.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool can_add_to(const torch::Tensor& gradient, const torch::Tensor& weight) {
  return gradient.defined() && gradient.layout() == torch::kStrided && gradient.strides() == weight.strides();
}

class LargeLinear : public torch::autograd::Function<LargeLinear> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& input, const torch::Tensor& weight,
                               const std::optional<torch::Tensor>& bias) {
    context->save_for_backward({input, weight});
    context->saved_data["has_bias"] = bias.has_value();
    return at::linear(input, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const torch::Tensor &input = saved[0], &weight = saved[1], &gradient = gradients[0];
    const torch::Tensor rows = gradient.reshape({-1, weight.size(0)});
    variable_list result(3);
    if (context->needs_input_grad(0)) result[0] = gradient.matmul(weight);
    const torch::Tensor inputs = input.reshape({-1, weight.size(1)});
    if (can_add_to(weight.grad(), weight))
      weight.mutable_grad().addmm_(rows.t(), inputs);
    else
      result[1] = rows.t().mm(inputs);
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2)) result[2] = rows.sum(0);
    return result;
  }
};

class LargeEmbedding : public torch::autograd::Function<LargeEmbedding> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& weight, const torch::Tensor& indices) {
    context->save_for_backward({weight, indices});
    return at::embedding(weight, indices);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const torch::Tensor& weight = saved[0];
    const torch::Tensor rows = gradients[0].reshape({-1, weight.size(1)}), indices = saved[1].reshape({-1});
    if (!can_add_to(weight.grad(), weight))
      return {torch::zeros_like(weight, weight.options().requires_grad(false)).index_add_(0, indices, rows),
              torch::Tensor()};
    weight.mutable_grad().index_add_(0, indices, rows);
    return variable_list(2);
  }
};

}  // namespace

bool LargeWeights::is_large(const at::Tensor& weight) const {
  if (!at::GradMode::is_enabled() || weight.numel() < large_ || weight.dim() != 2) return false;
  if (!weight.requires_grad() || !weight.is_leaf() || !weight.is_contiguous()) return false;
  if (at::autocast::is_autocast_enabled(weight.device().type())) return false;
  const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
  return torch::autograd::impl::hooks(weight).empty() && accumulator->post_hooks().empty() &&
         accumulator->pre_hooks().empty() && accumulator->tensor_pre_hooks().empty() &&
         accumulator->tensor_post_acc_grad_hooks() == nullptr;
}

void LargeWeights::call(const c10::OperatorHandle& op, Stack& stack) {
  const std::string& name = op.schema().name();
  at::Tensor result;
  if (name == "aten::linear" && is_large(torch::jit::peek(stack, 1, 3).toTensor())) {
    auto bias = torch::jit::peek(stack, 2, 3).toOptional<at::Tensor>();
    if (bias && !bias->defined()) bias.reset();
    result =
        LargeLinear::apply(torch::jit::peek(stack, 0, 3).toTensor(), torch::jit::peek(stack, 1, 3).toTensor(), bias);
    torch::jit::drop(stack, 3);
  } else if (name == "aten::embedding" && is_large(torch::jit::peek(stack, 0, 5).toTensor()) &&
             torch::jit::peek(stack, 2, 5).toInt() < 0 && !torch::jit::peek(stack, 3, 5).toBool() &&
             !torch::jit::peek(stack, 4, 5).toBool()) {
    result = LargeEmbedding::apply(torch::jit::peek(stack, 0, 5).toTensor(), torch::jit::peek(stack, 1, 5).toTensor());
    torch::jit::drop(stack, 5);
  } else {
    return op.callBoxed(stack);
  }
  torch::jit::push(stack, result);
}

}  // namespace lockstep
