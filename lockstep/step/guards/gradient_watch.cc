// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/guards/gradient_watch.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
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

void GradientWatch::remember() {
  identities_.clear();
  std::vector<torch::Tensor> gradients;
  gradients.reserve(parameters_.size());
  for (const auto& [name, parameter] : parameters_) {
    identities_.emplace_back(parameter.grad());
    gradients.push_back(parameter.grad());
  }
  data_.watch(gradients);
}

void GradientWatch::forget() {
  identities_.clear();
  data_.watch({});
}

std::optional<std::size_t> GradientWatch::changed() const {
  for (std::size_t i = 0; i < identities_.size(); ++i)
    if (!(identities_[i] == parameters_[i].tensor.grad())) return i;
  return data_.changed();
}

void GradientWatch::require_unchanged() const {
  if (const auto i = changed())
    throw UsageError(
        {.what = concat("the gradient of ", parameters_[*i].name, " was changed between backward() and step()"),
         .likely = "clipping by hand, zero_grad() before step(), or a plain loss.backward() in between: "
                   ".grad is this rank's own gradient, not the mean",
         .next = "in Python lockstep.clip_grad_norm_() or clip_grad_value_(), lockstep.GradScaler, or `with "
                 "model.mean_gradients():` around it; in C++ mean_gradients() before it, or the optimizer's "
                 "set_clipping()"});
}

bool GradientWatch::zeroed() const {
  return changed() && std::ranges::all_of(parameters_, [](const auto& p) { return is_zero(p.tensor.grad()); });
}

bool GradientWatch::dropped() const {
  for (std::size_t i = 0; i < identities_.size(); ++i)
    if (const torch::Tensor& gradient = parameters_[i].tensor.grad();
        gradient.defined() && identities_[i].is_of(gradient))
      return false;
  return !identities_.empty();
}

bool is_zero(const torch::Tensor& gradient) {
  if (!gradient.defined() || gradient.numel() == 0) return true;
  if (gradient.is_sparse()) return is_zero(gradient._values());
  if (!gradient.is_cpu() || !gradient.is_non_overlapping_and_dense()) return !gradient.any().item<bool>();
  const auto* const bytes = static_cast<const char*>(gradient.const_data_ptr());
  return bytes[0] == 0 && std::memcmp(bytes, bytes + 1, gradient.nbytes() - 1) == 0;
}

void require_no_gradient(const std::vector<NamedTensor>& parameters) {
  for (const auto& [name, parameter] : parameters)
    if (!is_zero(parameter.grad()))
      throw UsageError(
          {.what = concat("backward() would add to a gradient of ", name, " that it has not counted"),
           .likely = "a plain loss.backward(), or a gradient that was set by hand, and no zero_grad() since",
           .next = "call zero_grad() first; for several backward() per step no_sync() around all but the last"});
}

}  // namespace lockstep
