// SPDX-License-Identifier: Apache-2.0
// step/guards/gradient_watch.h: finds gradients that were replaced or written between backward() and step().
//
// Threads: one thread
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/data_watch.h"
#include "lockstep/model/samples.h"
#include "lockstep/named_tensor.h"

namespace lockstep {

// Returns whether the gradient is zero or undefined. Reads it.
inline bool is_zero(const torch::Tensor& gradient) {
  if (!gradient.defined() || gradient.numel() == 0) return true;
  if (gradient.is_sparse()) return is_zero(gradient._values());
  if (!gradient.is_cpu() || !gradient.is_non_overlapping_and_dense()) return !gradient.any().item<bool>();
  const auto* const bytes = static_cast<const char*>(gradient.const_data_ptr());
  return bytes[0] == 0 && std::memcmp(bytes, bytes + 1, gradient.nbytes() - 1) == 0;
}

class GradientWatch {
 public:
  // parameters: must outlive this.
  explicit GradientWatch(const NamedTensors& parameters) : parameters_(parameters) {}

  // From now on: every .grad as it is.
  void remember() {
    identities_.clear();
    Tensors gradients;
    gradients.reserve(parameters_.size());
    for (const auto& [name, parameter] : parameters_) {
      identities_.emplace_back(parameter.grad());
      gradients.push_back(parameter.grad());
    }
    data_.watch(gradients);
  }
  void forget() {
    identities_.clear();
    data_.watch({});
  }

  // The first parameter, by its index, whose .grad is another tensor or has been written since. A write that torch's
  // version counter does not see is found if it came through data() or changed the whole tensor (model/samples.h).
  std::optional<size_t> changed() const {
    for (size_t i = 0; i < identities_.size(); ++i)
      if (!(identities_[i] == parameters_[i].tensor.grad())) return i;
    return data_.changed();
  }
  // Throws UsageError naming it.
  void require_unchanged() const {
    if (const auto i = changed())
      throw UsageError(
          {.what = concat("the gradient of ", parameters_[*i].name, " was changed between backward() and step()"),
           .likely = "clipping by hand, zero_grad() before step(), or a plain loss.backward() in between: "
                     ".grad is this rank's own gradient, not the mean",
           .next = "in Python lockstep.clip_grad_norm_() or clip_grad_value_(), lockstep.GradScaler, or `with "
                   "model.mean_gradients():` around it; in C++ mean_gradients() before it, or the optimizer's "
                   "set_clipping()"});
  }

  // Returns whether zero_grad() was called since: some .grad changed, and every one that is still there is zero.
  bool zeroed() const {
    return changed() && std::ranges::all_of(parameters_, [](const auto& p) { return is_zero(p.tensor.grad()); });
  }

  // Returns whether zero_grad() has dropped all gradients, whatever came since.
  bool dropped() const {
    for (size_t i = 0; i < identities_.size(); ++i)
      if (const torch::Tensor& gradient = parameters_[i].tensor.grad();
          gradient.defined() && identities_[i].is_of(gradient))
        return false;
    return !identities_.empty();
  }

 private:
  // A .grad as it was. Weak: the memory of a gradient that was dropped is free, but no later tensor is taken for it.
  struct Identity {
    static int64_t version_of(const torch::Tensor& gradient) { return gradient.defined() ? gradient._version() : 0; }
    explicit Identity(const torch::Tensor& gradient)
        : tensor(gradient.getIntrusivePtr()), version(version_of(gradient)), samples(hash_of_samples(gradient)) {}
    bool is_of(const torch::Tensor& gradient) const {
      return tensor._unsafe_get_target() == gradient.unsafeGetTensorImpl();
    }
    bool operator==(const torch::Tensor& gradient) const {
      return is_of(gradient) && version == version_of(gradient) && samples == hash_of_samples(gradient);
    }
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    int64_t version;
    uint64_t samples;
  };

  const NamedTensors& parameters_;
  std::vector<Identity> identities_;  // of each; empty: nothing is remembered
  DataWatch data_;
};

// backward() is about to add to .grad what it has counted. Throws UsageError naming the first that has a gradient already,
// which is not zero. Reads gradients.
inline void require_no_gradient(const NamedTensors& parameters) {
  for (const auto& [name, parameter] : parameters)
    if (!is_zero(parameter.grad()))
      throw UsageError(
          {.what = concat("backward() would add to a gradient of ", name, " that it has not counted"),
           .likely = "a plain loss.backward(), or a gradient that was set by hand, and no zero_grad() since",
           .next = "call zero_grad() first; for several backward() per step no_sync() around all but the last"});
}

}  // namespace lockstep
