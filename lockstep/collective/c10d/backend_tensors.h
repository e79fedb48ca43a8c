// SPDX-License-Identifier: Apache-2.0
// collective/c10d/backend_tensors.h: from torch's tensors and options to the arguments of a Call: contiguous memory, counts,
// dtypes, reductions; and the checks that c10d leaves to its backends.
//
// Flow:    collective/c10d/backend.cc -> here -> calls of collective/shm/group.h
// Owns:    FlatTensors holds its tensors, and a copy if they are not contiguous
// Threads: values
// Ranks:   no communication
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstddef>
#include <vector>

#include "lockstep/base/to_size.h"
#include "lockstep/collective_types.h"

namespace lockstep::backend {

using Tensor = at::Tensor;
using Tensors = std::vector<at::Tensor>;

ReduceOp to_reduce_op(const c10d::ReduceOp& op);  // PREMUL_SUM is the sum of what scaled() gives

// How elements of a tensor travel: `each` elements of `dtype` per element of torch's.
struct Unit {
  DType dtype;
  std::size_t each = 1;

  std::size_t count(std::int64_t elements) const { return to_size(elements) * each; }
};

Unit unit_to_move(const Tensor& tensor);
Unit unit_to_reduce(const Tensor& tensor, const c10d::ReduceOp& op);  // throws UsageError: not defined for its dtype

// Throw UsageError: not exactly one.
const Tensor& only_one(const Tensors& tensors, const char* what);
const Tensors& only_one(const std::vector<Tensors>& lists, const char* what);

// Tensors of one dtype as one contiguous range of memory: in place if they are adjacent, otherwise a copy.
class FlatTensors {
 public:
  FlatTensors() = default;
  explicit FlatTensors(Tensors tensors, bool must_copy = false);  // throws UsageError, DeviceError

  const Tensor& first() const { return tensors_.front(); }
  void* memory() const;
  std::int64_t elements() const;
  bool overlaps(const FlatTensors& other) const;

  void copy_in() const;   // from the tensors, if there is a copy
  void copy_out() const;  // to the tensors, likewise

 private:
  std::size_t bytes() const;
  bool lie_together() const;

  Tensors tensors_;
  Tensor copy_;
};

// Input and output of a Call are the same memory or do not overlap: any other input is copied first.
FlatTensors input_beside(const Tensors& inputs, const FlatTensors& output);

// PREMUL_SUM: every rank's tensor times a factor, then summed.
Tensor scaled(const Tensor& tensor, const c10d::ReduceOp& op);
Tensors scaled(const Tensors& tensors, const c10d::ReduceOp& op);

// The counts of the core for a whole that is a part per rank, one after the other.
struct Counts {
  std::size_t even = 0;
  std::vector<std::size_t> each;  // none: all are `even`

  std::size_t of(int rank) const { return each.empty() ? even : each[to_size(rank)]; }
};

// `whole` is a tensor per rank, or one tensor for all.
Counts counts_of(const Tensors& whole, int size, Unit unit);
std::vector<std::size_t> counts_of_tensors(const Tensors& tensors, int size);
std::vector<std::size_t> counts_of_rows(const Tensor& tensor, const std::vector<std::int64_t>& splits, int size,
                                        const char* what);

// Throw UsageError.
void check_part(const Tensor& part, const Tensor& whole, std::size_t count, Unit unit);
void check_equal_parts(const Tensors& whole, const Tensor& part, int size);  // gather and scatter know one size only
void check_same_dtype(const Tensor& input, const Tensor& output);
void check_pairs(const Tensors& outputs, const Tensors& inputs);

}  // namespace lockstep::backend
