// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/add_in_place.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
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

// How many output channels have about `elements` of the weight, or an eighth of it: a multiple of 16, as the vectors of its
// kernels are.
std::int64_t channels_with(std::int64_t elements, const torch::Tensor& weight) {
  constexpr std::int64_t kVector = 16, kParts = 8;
  const std::int64_t of_channel = weight.numel() / weight.size(0);
  return std::max(kVector, std::max(elements, weight.numel() / kParts) / of_channel / kVector * kVector);
}

// The kernels of a convolution can't add, and make two more copies of the weight's gradient in layouts of their own. So
// this one is made a few output channels at a time.
class LargeConvolution : public torch::autograd::Function<LargeConvolution> {
 public:
  using Sizes = std::vector<std::int64_t>;  // by dimension

  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& input, const torch::Tensor& weight,
                               const std::optional<torch::Tensor>& bias, const Sizes& stride, const Sizes& padding,
                               const Sizes& dilation, std::int64_t elements) {
    context->save_for_backward({input, weight});
    context->saved_data["has_bias"] = bias.has_value();
    context->saved_data["stride"] = stride;
    context->saved_data["padding"] = padding;
    context->saved_data["dilation"] = dilation;
    context->saved_data["elements"] = elements;
    return at::conv2d(input, weight, bias, stride, padding, dilation);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const torch::Tensor &input = saved[0], &weight = saved[1], &gradient = gradients[0];
    variable_list result(7);
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2)) result[2] = gradient.sum({0, 2, 3});
    const bool in_place = can_add_to(weight.grad(), weight);
    const torch::Tensor sum = in_place ? weight.grad() : torch::zeros_like(weight.detach());
    const std::int64_t step = channels_with(context->saved_data["elements"].toInt(), weight);
    for (std::int64_t begin = 0; begin < weight.size(0); begin += step) {
      const std::int64_t count = std::min(step, weight.size(0) - begin);
      const auto part = gradients_of(context, input, weight.narrow(0, begin, count), gradient.narrow(1, begin, count),
                                     {false, true, false});
      sum.narrow(0, begin, count).add_(std::get<1>(part));
    }
    if (!in_place) result[1] = sum;
    if (context->needs_input_grad(0))
      result[0] = std::get<0>(gradients_of(context, input, weight, gradient, {true, false, false}));
    return result;
  }

 private:
  static std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> gradients_of(AutogradContext* context,
                                                                              const torch::Tensor& input,
                                                                              const torch::Tensor& weight,
                                                                              const torch::Tensor& gradient,
                                                                              std::array<bool, 3> wanted) {
    const auto sizes = [&](const char* name) { return context->saved_data[name].toIntVector(); };
    return at::convolution_backward(gradient, input, weight, std::nullopt, sizes("stride"), sizes("padding"),
                                    sizes("dilation"), false, {0, 0}, 1, wanted);
  }
};

// bias: as an operator was given it
std::optional<at::Tensor> defined(std::optional<at::Tensor> bias) {
  return bias && bias->defined() ? std::move(bias) : std::nullopt;
}

}  // namespace

bool LargeWeights::is_large(const at::Tensor& weight, std::int64_t dimensions) const {
  if (!at::GradMode::is_enabled() || weight.numel() < large_ || weight.dim() != dimensions) return false;
  if (!weight.requires_grad() || !weight.is_leaf() || !weight.is_non_overlapping_and_dense()) return false;
  if (at::autocast::is_autocast_enabled(weight.device().type())) return false;
  const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
  return torch::autograd::impl::hooks(weight).empty() && accumulator->post_hooks().empty() &&
         accumulator->pre_hooks().empty() && accumulator->tensor_pre_hooks().empty() &&
         accumulator->tensor_post_acc_grad_hooks() == nullptr;
}

// Without groups, of a batch, and with a padding in numbers.
bool LargeWeights::is_large_convolution(const c10::OperatorHandle& op, const Stack& stack) const {
  return op.schema().overload_name().empty() && is_large(torch::jit::peek(stack, 1, 7).toTensor(), 4) &&
         torch::jit::peek(stack, 0, 7).toTensor().dim() == 4 && torch::jit::peek(stack, 6, 7).toInt() == 1;
}

void LargeWeights::call(const c10::OperatorHandle& op, Stack& stack) {
  const std::string& name = op.schema().name();
  at::Tensor result;
  if (name == "aten::linear" && is_large(torch::jit::peek(stack, 1, 3).toTensor(), 2)) {
    result = LargeLinear::apply(torch::jit::peek(stack, 0, 3).toTensor(), torch::jit::peek(stack, 1, 3).toTensor(),
                                defined(torch::jit::peek(stack, 2, 3).toOptional<at::Tensor>()));
    torch::jit::drop(stack, 3);
  } else if (name == "aten::conv2d" && is_large_convolution(op, stack)) {
    const auto sizes = [&](std::size_t i) { return torch::jit::peek(stack, i, 7).toIntVector(); };
    result = LargeConvolution::apply(torch::jit::peek(stack, 0, 7).toTensor(), torch::jit::peek(stack, 1, 7).toTensor(),
                                     defined(torch::jit::peek(stack, 2, 7).toOptional<at::Tensor>()), sizes(3),
                                     sizes(4), sizes(5), large_ / 2);
    torch::jit::drop(stack, 7);
  } else if (name == "aten::embedding" && is_large(torch::jit::peek(stack, 0, 5).toTensor(), 2) &&
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
