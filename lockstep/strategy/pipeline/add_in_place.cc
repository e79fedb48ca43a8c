// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/add_in_place.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <array>
#include <string>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using ConvolutionSizes = std::array<std::vector<int64_t>, 3>;  // by dimension
constexpr std::array kSizes = {"stride", "padding", "dilation"};

bool can_add_to(const Tensor& gradient, const Tensor& weight) {
  return gradient.defined() && gradient.layout() == torch::kStrided && gradient.strides() == weight.strides();
}

bool are_indices(const Tensor& input) { return c10::isIntegralType(input.scalar_type(), /*includeBool=*/false); }

// Returns how many output channels have about `elements` of the weight, or an eighth of it: a multiple of 16, as the
// vectors of its kernels are.
int64_t channels_with(int64_t elements, const Tensor& weight) {
  constexpr int64_t kVector = 16, kParts = 8;
  const int64_t of_channel = weight.numel() / weight.size(0);
  return std::max(kVector, std::max(elements, weight.numel() / kParts) / of_channel / kVector * kVector);
}

// An embedding, whose input are indices; a linear layer, with a weight of two dimensions; or a convolution, of four.
class LargeOperator : public torch::autograd::Function<LargeOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& weight,
                        const std::optional<Tensor>& bias, const ConvolutionSizes& sizes, int64_t elements) {
    context->save_for_backward({input, weight});
    context->saved_data["has_bias"] = bias.has_value();
    context->saved_data["elements"] = elements;
    for (size_t i = 0; i < sizes.size(); ++i) context->saved_data[kSizes[i]] = sizes[i];
    if (are_indices(input)) return at::embedding(weight, input);
    return weight.dim() == 2 ? at::linear(input, weight, bias)
                             : at::conv2d(input, weight, bias, sizes[0], sizes[1], sizes[2]);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &gradient = gradients[0];
    const bool is_convolution = weight.dim() == 4;
    variable_list result(5);
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2))
      result[2] = is_convolution ? gradient.sum({0, 2, 3}) : gradient.reshape({-1, weight.size(0)}).sum(0);
    const bool in_place = can_add_to(weight.grad(), weight);
    const Tensor sum = in_place ? weight.grad() : torch::zeros_like(weight.detach());
    is_convolution ? add_of_convolution(context, sum, input, weight, gradient) : add(sum, input, gradient);
    if (!in_place) result[1] = sum;
    if (context->needs_input_grad(0))
      result[0] = is_convolution ? std::get<0>(of_convolution(context, input, weight, gradient, {true, false, false}))
                                 : gradient.matmul(weight);
    return result;
  }

 private:
  // sum += the gradient of the weight.
  static void add(const Tensor& sum, const Tensor& input, const Tensor& gradient) {
    const Tensor rows = gradient.reshape({-1, gradient.size(-1)});
    if (are_indices(input))
      sum.index_add_(0, input.reshape({-1}), rows);
    else
      sum.addmm_(rows.t(), input.reshape({-1, input.size(-1)}));
  }

  // A few output channels at a time: the kernels of a convolution can't add, and make two more copies of the weight's
  // gradient in layouts of their own.
  static void add_of_convolution(AutogradContext* context, const Tensor& sum, const Tensor& input, const Tensor& weight,
                                 const Tensor& gradient) {
    const int64_t step = channels_with(context->saved_data["elements"].toInt(), weight);
    for (int64_t begin = 0; begin < weight.size(0); begin += step) {
      const int64_t count = std::min(step, weight.size(0) - begin);
      const auto part = of_convolution(context, input, weight.narrow(0, begin, count), gradient.narrow(1, begin, count),
                                       {false, true, false});
      sum.narrow(0, begin, count).add_(std::get<1>(part));
    }
  }

  static std::tuple<Tensor, Tensor, Tensor> of_convolution(AutogradContext* context, const Tensor& input,
                                                           const Tensor& weight, const Tensor& gradient,
                                                           std::array<bool, 3> wanted) {
    const auto sizes = [&](size_t i) { return context->saved_data[kSizes[i]].toIntVector(); };
    return at::convolution_backward(gradient, input, weight, std::nullopt, sizes(0), sizes(1), sizes(2), false, {0, 0},
                                    1, wanted);
  }
};

}  // namespace

bool LargeWeights::is_large(const at::Tensor& weight, int64_t dimensions) const {
  if (!at::GradMode::is_enabled() || weight.numel() < large_ || weight.dim() != dimensions) return false;
  if (!weight.requires_grad() || !weight.is_leaf() || !weight.is_non_overlapping_and_dense()) return false;
  if (at::autocast::is_autocast_enabled(weight.device().type())) return false;
  const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
  return torch::autograd::impl::hooks(weight).empty() && accumulator->post_hooks().empty() &&
         accumulator->pre_hooks().empty() && accumulator->tensor_pre_hooks().empty() &&
         accumulator->tensor_post_acc_grad_hooks() == nullptr;
}

void LargeWeights::call(const c10::OperatorHandle& op, Stack& stack) {
  const std::string& name = op.schema().name();
  const size_t count = op.schema().arguments().size();
  const auto given = torch::jit::last(stack, count);
  const bool is_embedding = name == "aten::embedding" && is_large(given[0].toTensor(), 2) && given[2].toInt() < 0 &&
                            !given[3].toBool() && !given[4].toBool();
  // A convolution without groups, of a batch, and with a padding in numbers.
  const bool is_convolution = name == "aten::conv2d" && op.schema().overload_name().empty() &&
                              is_large(given[1].toTensor(), 4) && given[0].toTensor().dim() == 4 &&
                              given[6].toInt() == 1;
  if (!is_embedding && !is_convolution && !(name == "aten::linear" && is_large(given[1].toTensor(), 2)))
    return op.callBoxed(stack);
  ConvolutionSizes sizes;
  if (is_convolution)
    for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = given[3 + i].toIntVector();
  std::optional<at::Tensor> bias = is_embedding ? std::nullopt : given[2].toOptional<at::Tensor>();
  if (bias && !bias->defined()) bias = std::nullopt;
  const at::Tensor result = LargeOperator::apply(given[is_embedding ? 1 : 0].toTensor(),
                                                 given[is_embedding ? 0 : 1].toTensor(), bias, sizes, large_ / 2);
  torch::jit::drop(stack, count);
  torch::jit::push(stack, result);
}

}  // namespace lockstep
