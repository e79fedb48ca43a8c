// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/gradient_watch.h"

#include <algorithm>
#include <cstring>

#include "lockstep/model/samples.h"

namespace lockstep {
namespace {

std::int64_t version_in_place(const torch::Tensor& gradient) { return gradient.defined() ? gradient._version() : 0; }

}  // namespace

GradientWatch::Identity::Identity(const torch::Tensor& gradient)
    : tensor(gradient.getIntrusivePtr()), version(version_in_place(gradient)), samples(hash_of_samples(gradient)) {}

bool GradientWatch::Identity::is_of(const torch::Tensor& gradient) const {
  return tensor._unsafe_get_target() == gradient.unsafeGetTensorImpl();
}

bool GradientWatch::Identity::operator==(const torch::Tensor& gradient) const {
  return is_of(gradient) && version == version_in_place(gradient) && samples == hash_of_samples(gradient);
}

void GradientWatch::remember(const std::vector<NamedTensor>& parameters) {
  parameters_.clear();
  identities_.clear();
  std::vector<torch::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const auto& [name, parameter] : parameters) {
    parameters_.push_back(parameter);
    identities_.emplace_back(parameter.grad());
    gradients.push_back(parameter.grad());
  }
  data_.watch(gradients);
}

std::optional<std::size_t> GradientWatch::changed() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (!(identities_[i] == parameters_[i].grad())) return i;
  return data_.changed();
}

bool GradientWatch::zeroed() const {
  return changed() && std::ranges::all_of(parameters_, [](const auto& p) { return is_zero(p.grad()); });
}

bool GradientWatch::dropped() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].grad().defined() && identities_[i].is_of(parameters_[i].grad())) return false;
  return !parameters_.empty();
}

bool is_zero(const torch::Tensor& gradient) {
  if (!gradient.defined() || gradient.numel() == 0) return true;
  if (gradient.is_sparse()) return is_zero(gradient._values());
  if (!gradient.is_cpu() || !gradient.is_non_overlapping_and_dense()) return !gradient.any().item<bool>();
  const auto* const bytes = static_cast<const char*>(gradient.const_data_ptr());
  return bytes[0] == 0 && std::memcmp(bytes, bytes + 1, gradient.nbytes() - 1) == 0;
}

std::optional<std::size_t> first_with_gradient(const std::vector<NamedTensor>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (!is_zero(parameters[i].tensor.grad())) return i;
  return std::nullopt;
}

}  // namespace lockstep
