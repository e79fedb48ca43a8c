// SPDX-License-Identifier: Apache-2.0
// collective/calls/tensor_call.h: a Call on torch's tensors: makes tensors dense and keeps them alive.
//
// Flow:    World's calls, c10d/backend_calls.h -> here; begin() -> Transport -> finish()
// Owns:    references to the tensors; copies of those that have gaps, or overlap where they must not
// Threads: values
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <optional>

#include "lockstep/collective/calls/call.h"
#include "lockstep/named_tensor.h"

namespace lockstep {

std::optional<DType> to_dtype(at::ScalarType dtype);  // none for a dtype that collectives do not exchange

struct TensorCall : Call {        // whose memory is that of the next two
  torch::Tensor input_tensor{};   // dense; undefined where this rank gives nothing
  torch::Tensor output_tensor{};  // dense; undefined where this rank gets nothing
  torch::Tensor result{};         // for the caller: the output, or the tensor with gaps that it stands for
  Tensors copied_from{};          // the tensors that the input is a copy of; none: it is the caller's memory
  Tensors copied_to{};            // likewise, of the output

  void begin() const;   // before the call: fills an input that is a copy
  void finish() const;  // after the call: copies the output to where the caller wants it
};

// `call` on these tensors, each list as one array: in place where its tensors are dense and lie one after the other,
// otherwise a copy. An input is also copied if it overlaps an output that is not the same tensors. Tensors in lists of
// several are on the CPU.
TensorCall with_memory(Call call, at::TensorList inputs, at::TensorList outputs);

template <class Number>
std::vector<Number> numbers_in(const torch::Tensor& dense) {
  const auto* const first = dense.const_data_ptr<Number>();
  return {first, first + dense.numel()};
}

// The elements of each rank's part of a tensor that is cut into `rows` of its first dimension; none: equal parts. Throws
// UsageError, which calls the tensor `what`: not a count for each rank, a negative one, or another sum.
std::vector<size_t> counts_of_rows(const torch::Tensor& tensor, const std::vector<int64_t>& rows, int ranks,
                                   const std::string& what);

}  // namespace lockstep
