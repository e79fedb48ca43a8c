// SPDX-License-Identifier: Apache-2.0
// step/guards/gradient_watch.h: finds gradients that were replaced or written between backward() and step().
//
// Threads: one thread
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/model/data_watch.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

class GradientWatch {
 public:
  // parameters: must outlive this.
  explicit GradientWatch(const std::vector<NamedTensor>& parameters) : parameters_(parameters) {}

  void remember();  // from now on: every .grad as it is
  void forget();

  // The first parameter, by its index, whose .grad is another tensor or has been written since. A write that torch's
  // version counter does not see is found if it came through data() or changed the whole tensor (model/samples.h).
  std::optional<std::size_t> changed() const;
  void require_unchanged() const;  // throws UsageError naming it

  // Returns whether zero_grad() was called since: some .grad changed, and every one that is still there is zero.
  bool zeroed() const;

  // Returns whether zero_grad() has dropped all gradients, whatever came since.
  bool dropped() const;

 private:
  // A .grad as it was. Weak: the memory of a gradient that was dropped is free, but no later tensor is taken for it.
  struct Identity {
    explicit Identity(const torch::Tensor& gradient);
    bool is_of(const torch::Tensor& gradient) const;
    bool operator==(const torch::Tensor& gradient) const;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    std::int64_t version;
    std::uint64_t samples;
  };

  const std::vector<NamedTensor>& parameters_;
  std::vector<Identity> identities_;  // of each; empty: nothing is remembered
  DataWatch data_;
};

bool is_zero(const torch::Tensor& gradient);  // or undefined. Reads it

// backward() is about to add to .grad what it has counted. Throws UsageError naming the first that has a gradient already,
// which is not zero. Reads gradients.
void require_no_gradient(const std::vector<NamedTensor>& parameters);

}  // namespace lockstep
