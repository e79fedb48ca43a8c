// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/gradient_watch.h"

#include <algorithm>

namespace lockstep {
namespace {

std::pair<const void*, std::int64_t> identity_of(const torch::Tensor& gradient) {
  return {gradient.unsafeGetTensorImpl(), gradient.defined() ? gradient._version() : 0};
}

bool is_zero(const torch::Tensor& gradient) {
  return !gradient.defined() || !(gradient.is_sparse() ? gradient._values() : gradient).any().item<bool>();
}

}  // namespace

void GradientWatch::remember(const std::vector<NamedTensor>& parameters) {
  parameters_.clear();
  identities_.clear();
  std::vector<torch::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const auto& [name, parameter] : parameters) {
    parameters_.push_back(parameter);
    identities_.push_back(identity_of(parameter.grad()));
    gradients.push_back(parameter.grad());
  }
  data_.watch(gradients);
}

void GradientWatch::forget() { remember({}); }

std::optional<std::size_t> GradientWatch::changed() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (identity_of(parameters_[i].grad()) != identities_[i]) return i;
  return data_.changed();
}

bool GradientWatch::zeroed() const {
  return changed() &&
         std::all_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return is_zero(p.grad()); });
}

}  // namespace lockstep
