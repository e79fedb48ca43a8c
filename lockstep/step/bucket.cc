// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/bucket.h"

#include <algorithm>
#include <ranges>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/step/local_gradients.h"

namespace lockstep {
namespace {

// Goes through the parameters from the last to the first, since backward() reaches the last ones first, and starts a
// new bucket whenever the next one does not fit.
std::vector<NamedTensors> cut_into_buckets(const NamedTensors& parameters, size_t limit) {
  std::vector<NamedTensors> buckets;
  size_t bytes = 0;
  for (const NamedTensor& parameter : std::views::reverse(parameters)) {
    const torch::Tensor& next = parameter.tensor;
    bytes += next.nbytes();
    if (buckets.empty() || bytes > limit || buckets.back()[0].tensor.dtype() != next.dtype() ||
        buckets.back()[0].tensor.device() != next.device()) {
      buckets.emplace_back();
      bytes = next.nbytes();
    }
    buckets.back().push_back(parameter);
  }
  return buckets;
}

// Elements from the beginning of one parameter to that of the next.
int64_t place_of(const torch::Tensor& parameter, int slices) {
  return slices == 0 ? parameter.numel() : round_up<int64_t>(parameter.numel(), kCacheLine / parameter.element_size());
}

// Layout, in elements: the gradients of the slots one after another, without gaps unless there are slices, then a flag for each
// slot, all of the parameters' dtype. Flags are exchanged with the gradients: their sum says how many ranks have a gradient.
Bucket make_bucket(const World& world, const NamedTensors& parameters, int slices) {
  constexpr size_t kWidestLoad = 16;  // bytes, of a GPU
  int64_t values = 0;
  for (const auto& [name, tensor] : parameters) values += place_of(tensor, slices);
  if (slices > 0) values = round_up<int64_t>(values, slices * kWidestLoad / parameters[0].tensor.element_size());
  const int64_t count = std::ssize(parameters);
  Bucket bucket;
  bucket.flat = world.allocate({values + count}, parameters.front().tensor.options().requires_grad(false)).zero_();
  bucket.values = bucket.flat.narrow(0, 0, values);
  bucket.flags = bucket.flat.narrow(0, values, count);
  int64_t offset = 0, index = 0;
  for (const auto& parameter : parameters) {
    const int64_t size = parameter.tensor.numel();
    bucket.slots.push_back({parameter, bucket.flat.narrow(0, offset, size), bucket.flags.narrow(0, index++, 1)});
    offset += place_of(parameter.tensor, slices);
  }
  return bucket;
}

// The gradient's values in the parameter's memory order. Autograd uses that order itself, except for gradients that were
// assigned by hand or made with create_graph.
torch::Tensor in_parameter_order(const NamedTensor& parameter, const torch::Tensor& gradient) {
  if (gradient.layout() != torch::kStrided)
    throw UsageError({.what = concat("the gradient of ", parameter.name, " is sparse, which was not expected"),
                      .likely = "an embedding with sparse(true) in a module of your own",
                      .next = "name it in the option sparse_parameters"});
  return dense_view(gradient_like(parameter.tensor, gradient));
}

torch::Tensor number(double value) { return torch::scalar_tensor(value, torch::kFloat64); }

}  // namespace

void Slot::pack(bool counts, double weight) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& from = parameter.tensor.grad();
  is_used = from.defined() && counts;
  if (is_used)
    at::mul_out(gradient, in_parameter_order(parameter, from),
                number(weight));  // in place where the slot is the gradient
  else
    gradient.zero_();
  flag.fill_(is_used ? 1 : 0);
  packed = true;
}

void Slot::store_mean(double factor, bool as_view) {
  torch::Tensor& into = parameter.tensor.mutable_grad();
  if (as_view) {
    gradient.mul_(factor);
    if (into.defined() && into.const_data_ptr() == gradient.const_data_ptr()) return;
    // By set_(): autograd must not see a view, because Optimizer::zero_grad() detaches gradients in place, an error for views.
    into =
        torch::empty({0}, gradient.options())
            .set_(gradient.storage(), gradient.storage_offset(), parameter.tensor.sizes(), parameter.tensor.strides());
    return;
  }
  if (!into.defined() || into.strides() != parameter.tensor.strides())
    into = torch::empty_like(parameter.tensor, parameter.tensor.options().requires_grad(false));
  torch::Tensor values = dense_view(into);
  at::mul_out(values, gradient, number(factor));
}

void Slot::move_parameter(const torch::Tensor& block) {
  const torch::NoGradGuard no_grad;
  torch::Tensor& tensor = parameter.tensor;
  const torch::Tensor place = block.as_strided(tensor.sizes(), tensor.strides(), gradient.storage_offset());
  place.copy_(tensor);
  tensor.set_data(place);
}

bool Bucket::full() const { return std::ranges::all_of(slots, &Slot::packed); }

Tensors Bucket::parts() const {
  Tensors parts;
  for (const Slot& slot : slots) {
    const torch::Tensor& parameter = slot.parameter.tensor;
    const bool matrix = parameter.dim() > 1 && parameter.numel() > 0;
    parts.push_back(matrix ? slot.gradient.view({parameter.size(0), -1}) : slot.gradient);
  }
  return parts;
}

Tensors Bucket::parameters() const {
  Tensors parameters;
  for (const Slot& slot : slots) parameters.push_back(slot.parameter.tensor);
  return parameters;
}

std::vector<Bucket> make_buckets(const World& world, const NamedTensors& parameters, size_t limit, int slices) {
  std::vector<Bucket> buckets;
  for (const auto& group : cut_into_buckets(parameters, limit)) buckets.push_back(make_bucket(world, group, slices));
  return buckets;
}

}  // namespace lockstep
