// SPDX-License-Identifier: Apache-2.0
#include "lockstep/sync_batch_norm.h"

#include <ATen/ops/batch_norm.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/base/process/in_autograd.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// (C) -> (1, C, 1, ...)
Tensor per_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(to_size(input.dim()), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

// The dimensions of (B, C, ...) that are summed over: all but the channels.
std::vector<int64_t> summed_dimensions(const Tensor& input) {
  std::vector<int64_t> dimensions{0};
  for (int64_t dimension = 2; dimension < input.dim(); ++dimension) dimensions.push_back(dimension);
  return dimensions;
}

// (2, C) and two counts -> their sums over all ranks. In float64: the variance is a difference of large numbers.
struct Sums {
  Tensor rows;
  double count, needing;
};
Sums summed_over_ranks(const World& world, const Tensor& rows, int64_t count = 0, bool needs = false) {
  const Tensor counts = torch::tensor({to_double(count), needs ? 1.0 : 0.0}, torch::kFloat64);
  const Tensor all = torch::cat({rows.flatten(), counts.to(rows.device())});
  world.all_reduce(all);
  return {all.narrow(0, 0, rows.numel()).view(rows.sizes()), all[-2].item<double>(), all[-1].item<double>()};
}

// The part of the call that backward() needs; the world lives as long as the graph.
struct Ranks : torch::CustomClassHolder {
  Ranks(World all, std::function<double()> weight) : world(std::move(all)), loss_weight(std::move(weight)) {}
  World world;
  std::function<double()> loss_weight;
  bool need_gradient = false;  // of the input, on this rank
};

// x -> (x - mean) / sqrt(var + eps), with mean and variance over all ranks.
class Normalise : public torch::autograd::Function<Normalise> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& input, const c10::intrusive_ptr<Ranks>& ranks,
                               double eps) {
    const Tensor wide = input.to(torch::kFloat64);
    const auto dimensions = summed_dimensions(input);
    const Tensor sums = torch::stack({wide.sum(dimensions), wide.square().sum(dimensions)});
    const int64_t mine = input.numel() / input.size(1);
    const auto [all, count, needing] = summed_over_ranks(ranks->world, sums, mine, ranks->need_gradient);
    if (needing > 0 && needing < ranks->world.size())  // backward() would wait for the others
      throw MismatchError(
          {.what = concat("the input of SyncBatchNorm needs a gradient on ", needing, " ranks only"),
           .here = concat(ranks->world.describe(), ranks->need_gradient ? ", where it does" : ", where it does not"),
           .likely = "layers before it that are frozen or unused on some ranks"});
    const Tensor mean = all[0] / count;
    const Tensor variance = (all[1] / count - mean.square()).clamp_min(0);
    const Tensor inverse = (variance + eps).rsqrt();
    const Tensor output = ((wide - per_channel(mean, input)) * per_channel(inverse, input)).to(input.scalar_type());
    context->save_for_backward({output, inverse});
    context->saved_data["ranks"] = c10::IValue::make_capsule(ranks);
    context->saved_data["mine"] = to_double(mine);
    context->saved_data["count"] = count;
    const Tensor unbiased = variance * (count / std::max(count - 1, 1.0));
    context->mark_non_differentiable({mean, unbiased});
    return {output, mean, unbiased};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list found;
    in_autograd([&] { found = gradient_of_input(context, gradients); });
    return found;
  }

 private:
  // The weight of this rank's loss in the mean over all ranks, in any unit. 0 only where its gradient is not used.
  static double loss_weight(AutogradContext* context, const Ranks& ranks) {
    return ranks.loss_weight ? ranks.loss_weight() : context->saved_data["mine"].toDouble();
  }

  // Returns dx = inverse (dy - mean(dy) - y mean(dy y)), with y the output and means over all ranks. dy is the gradient of
  // a rank's own mean, which counts in the mean over all ranks by its weight: for the means it is multiplied by that, for
  // dx divided again.
  static variable_list gradient_of_input(AutogradContext* context, const variable_list& gradients) {
    if (torch::GradMode::is_enabled())
      throw UsageError({.what = "a second derivative of SyncBatchNorm", .next = "use GroupNorm there"});
    const auto saved = context->get_saved_variables();
    const auto ranks = c10::static_intrusive_pointer_cast<Ranks>(context->saved_data["ranks"].toCapsule());
    const double weight = loss_weight(context, *ranks);
    const double count = context->saved_data["count"].toDouble();
    const Tensor dy = gradients[0].to(torch::kFloat64);
    const Tensor y = saved[0].to(torch::kFloat64);
    const auto dimensions = summed_dimensions(dy);
    Tensor sums = torch::stack({dy.sum(dimensions), (dy * y).sum(dimensions)}) * weight;
    if (weight == 0) sums.zero_();  // dy may be NaN
    const Tensor means = summed_over_ranks(ranks->world, sums).rows / (count * (weight > 0 ? weight : 1));
    const Tensor dx = per_channel(saved[1], dy) * (dy - per_channel(means[0], dy) - y * per_channel(means[1], dy));
    return {dx.to(gradients[0].scalar_type()), {}, {}};
  }
};

}  // namespace

Tensors normalise_over_ranks(const World& world, const Tensor& input, double eps,
                             const std::function<double()>& loss_weight) {
  const auto ranks = c10::make_intrusive<Ranks>(world, loss_weight);
  ranks->need_gradient = torch::GradMode::is_enabled() && input.requires_grad();
  return Normalise::apply(input, ranks, eps);
}

// A group of its own keeps its collectives in order, even while gradients are exchanged during backward.
SyncBatchNormImpl::SyncBatchNormImpl(const World& world, const SyncBatchNormOptions& options)
    : weight(register_parameter("weight", torch::ones({options.features}))),
      bias(register_parameter("bias", torch::zeros({options.features}))),
      running_mean(register_buffer("running_mean", torch::zeros({options.features}))),
      running_var(register_buffer("running_var", torch::ones({options.features}))),
      world_(*world.split(0)),
      options_(options) {}

Tensor SyncBatchNormImpl::forward(const Tensor& input) {
  if (input.dim() < 2 || input.size(1) != options_.features)
    throw UsageError(
        {.what = concat("SyncBatchNorm of ", options_.features, " channels, given a tensor of shape ", input.sizes()),
         .next = "give (batch, channels, ...)"});
  if (!is_training())
    return torch::batch_norm(input, weight, bias, running_mean, running_var, false, 0, options_.eps, false);
  const variable_list found = normalise_over_ranks(world_, input, options_.eps);
  {
    const torch::NoGradGuard no_grad;
    running_mean.lerp_(found[1].to(running_mean.scalar_type()), options_.momentum);
    running_var.lerp_(found[2].to(running_var.scalar_type()), options_.momentum);
  }
  return found[0] * per_channel(weight, input) + per_channel(bias, input);
}

}  // namespace lockstep
