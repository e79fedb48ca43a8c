// SPDX-License-Identifier: Apache-2.0
// lockstep/batch.h: a batch's tensors, and functions of them.
//
// Threads: values; copies share the tensors' memory
// Ranks:   no communication
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "lockstep/named_tensor.h"

namespace lockstep {

// A rank's part of a global batch. data: (B, ...), float for images and tables, int64 for tokens; target: (B) int64
// where the dataset has classes. B may be 0: a rank without samples still takes part in the step.
struct Batch {
  Tensor data{};
  Tensor target{};
  std::map<std::string, Tensor> more{};  // further ones by name, (B, ...): masks, boxes, lengths

  int64_t size() const {
    const Tensor& counted = target.defined() ? target : data;
    return counted.defined() ? counted.size(0) : 0;
  }

  // The tensor of this name in `more`. Throws UsageError: there is none.
  const Tensor& operator[](const std::string& name) const;

  // The batch of function(tensor) for each of its tensors.
  template <class Function>
  Batch map(const Function& function) const {
    Batch mapped = *this;
    const auto change = [&](Tensor& each) {
      if (each.defined()) each = function(std::as_const(each));
    };
    change(mapped.data);
    change(mapped.target);
    for (auto& [name, tensor] : mapped.more) change(tensor);
    return mapped;
  }

  Batch to(torch::Device device) const {
    return map([device](const Tensor& each) { return each.to(device); });
  }

  // Samples [begin, end), as views. Throws DataError: a tensor that has not B rows.
  Batch rows(int64_t begin, int64_t end) const;
};

// One batch of single samples, whose tensors have no dimension B; and of several batches. Throws DataError naming the tensor:
// sizes differ, or it is missing in some.
Batch stacked(const std::vector<Batch>& samples);
Batch concatenated(const std::vector<Batch>& batches);

// A function of First and a batch, made from one that takes the Batch, or that takes its tensor `of` alone.
template <class First, Tensor Batch::*of>
class BatchFunction {
  using OfTensor = std::function<Tensor(First, const Tensor&)>;
  using OfBatch = std::function<Tensor(First, const Batch&)>;

 public:
  BatchFunction(std::nullptr_t = nullptr) {}
  template <class F>
  requires(!std::same_as<F, BatchFunction> &&
           (std::constructible_from<OfTensor, F> || std::constructible_from<OfBatch, F>)) BatchFunction(F function) {
    if constexpr (std::constructible_from<OfTensor, F>)
      of_tensor_ = std::move(function);
    else
      of_batch_ = std::move(function);
  }

  Tensor operator()(First first, const Batch& batch) const {
    return of_batch_ ? of_batch_(first, batch) : of_tensor_(first, batch.*of);
  }
  Tensor operator()(First first, const Tensor& tensor) const {
    Batch batch;
    batch.*of = tensor;
    return (*this)(first, batch);
  }
  explicit operator bool() const { return of_tensor_ || of_batch_; }
  bool takes_batch() const { return static_cast<bool>(of_batch_); }

  // As std::function::target(), of a function that takes a tensor.
  template <class F>
  F* target() {
    return of_tensor_.template target<F>();
  }

 private:
  OfTensor of_tensor_;
  OfBatch of_batch_;
};

// A function of a model's output: a loss, or a figure.
using OutputFunction = BatchFunction<const Tensor&, &Batch::target>;

}  // namespace lockstep
