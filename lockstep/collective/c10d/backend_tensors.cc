// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend_tensors.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/torch_dtype.h"
#include "lockstep/error.h"

namespace lockstep::backend {
namespace {

void check_tensor(const Tensor& tensor) {
  if (!tensor.is_cpu())
    throw DeviceError({.what = concat("a tensor on ", tensor.device().str(), " was given to the lockstep backend"),
                       .likely = "a model on a GPU in a process group that is for the CPU only",
                       .next = "move it to the CPU, or use init_process_group(\"cpu:lockstep,cuda:nccl\")"});
  if (tensor.layout() != at::kStrided)
    throw UsageError({.what = concat("a tensor of layout ", c10::str(tensor.layout()), " can't be exchanged"),
                      .next = "call to_dense() on it first"});
}

Counts counts_of_one(const Tensor& whole, int size, Unit unit) {
  if (whole.numel() % size == 0) return {unit.count(whole.numel() / size), {}};
  throw UsageError({.what = concat("a tensor of ", whole.numel(), " elements is no equal parts for ", size, " ranks"),
                    .next = "make its size a multiple of the number of ranks"});
}

template <class Body>
void for_each_part(const Tensors& tensors, const Tensor& copy, const Body& body) {
  if (!copy.defined()) return;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::int64_t begin = 0;
  for (const Tensor& tensor : tensors) {
    body(tensor, copy.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

}  // namespace

FlatTensors::FlatTensors(Tensors tensors, bool must_copy) : tensors_(std::move(tensors)) {
  for (const Tensor& tensor : tensors_) {
    check_tensor(tensor);
    if (tensor.scalar_type() != tensors_.front().scalar_type())
      throw UsageError({.what = concat("one call with tensors of ", c10::toString(tensor.scalar_type()), " and of ",
                                       c10::toString(tensors_.front().scalar_type())),
                        .next = "convert them to one dtype"});
  }
  if (!tensors_.empty() && (must_copy || !lie_together())) copy_ = at::empty({elements()}, tensors_.front().dtype());
}

void* FlatTensors::memory() const {
  if (copy_.defined()) return copy_.mutable_data_ptr();
  return tensors_.empty() ? nullptr : tensors_.front().mutable_data_ptr();
}

std::int64_t FlatTensors::elements() const {
  std::int64_t sum = 0;
  for (const Tensor& tensor : tensors_) sum += tensor.numel();
  return sum;
}

bool FlatTensors::overlaps(const FlatTensors& other) const {
  const auto* const mine = static_cast<const std::byte*>(memory());
  const auto* const theirs = static_cast<const std::byte*>(other.memory());
  return mine < theirs + other.bytes() && theirs < mine + bytes();
}

void FlatTensors::copy_in() const {
  for_each_part(tensors_, copy_, [](const Tensor& tensor, const Tensor& part) { part.copy_(tensor); });
}

void FlatTensors::copy_out() const {
  for_each_part(tensors_, copy_, [](const Tensor& tensor, const Tensor& part) { tensor.copy_(part); });
}

std::size_t FlatTensors::bytes() const {
  return tensors_.empty() ? 0 : to_size(elements()) * tensors_.front().element_size();
}

bool FlatTensors::lie_together() const {
  const auto* next = static_cast<const std::byte*>(tensors_.front().const_data_ptr());
  for (const Tensor& tensor : tensors_) {
    if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) return false;
    if (tensor.numel() > 0 && tensor.const_data_ptr() != next) return false;
    next += tensor.nbytes();
  }
  return true;
}

ReduceOp to_reduce_op(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM: return ReduceOp::kSum;  // scaled() multiplies
    case c10d::ReduceOp::AVG: return ReduceOp::kMean;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN: return ReduceOp::kMin;
    case c10d::ReduceOp::MAX: return ReduceOp::kMax;
    case c10d::ReduceOp::BAND: return ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR: return ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR: return ReduceOp::kBitXor;
    case c10d::ReduceOp::UNUSED: break;
  }
  throw UsageError({.what = "a reduction that c10d does not define", .next = "use one of torch.distributed.ReduceOp"});
}

Unit unit_to_move(const Tensor& tensor) {
  if (const auto dtype = to_dtype(tensor.scalar_type())) return {*dtype};
  return {DType::kUInt8, to_size(tensor.element_size())};
}

Unit unit_to_reduce(const Tensor& tensor, const c10d::ReduceOp& op) {
  const at::ScalarType dtype = tensor.scalar_type();
  const bool as_real = at::isComplexType(dtype) && c10d::isComplexViewAsRealAllowed(op);
  if (const auto known = to_dtype(as_real ? c10::toRealValueType(dtype) : dtype)) return {*known, as_real ? 2U : 1U};
  throw UsageError({.what = concat("this reduction is not defined for tensors of ", c10::toString(dtype)),
                    .next = "convert the tensor, or choose another reduction"});
}

const Tensor& only_one(const Tensors& tensors, const char* what) {
  if (tensors.size() == 1) return tensors.front();
  throw UsageError({.what = concat(tensors.size(), " ", what, " tensors, where one is needed"),
                    .next = "call it once per tensor, or its coalesced form"});
}

const Tensors& only_one(const std::vector<Tensors>& lists, const char* what) {
  if (lists.size() == 1) return lists.front();
  throw UsageError({.what = concat(lists.size(), " lists of ", what, " tensors, where one is needed"),
                    .next = "give one tensor per rank"});
}

FlatTensors input_beside(const Tensors& inputs, const FlatTensors& output) {
  FlatTensors input(inputs);
  if (input.memory() != output.memory() && input.overlaps(output)) return FlatTensors(inputs, true);
  return input;
}

Tensor scaled(const Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
  const auto* const factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (factor == nullptr)
    throw UsageError({.what = "PREMUL_SUM without a factor", .next = "make it with makeNCCLPreMulSum"});
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Tensor product =
      factor->tensor_factor.defined() ? tensor.mul(factor->tensor_factor) : tensor.mul(factor->double_factor);
  return product.to(tensor.scalar_type());
}

Tensors scaled(const Tensors& tensors, const c10d::ReduceOp& op) {
  Tensors all;
  for (const Tensor& tensor : tensors) all.push_back(scaled(tensor, op));
  return all;
}

Counts counts_of(const Tensors& whole, int size, Unit unit) {
  if (whole.size() == 1) return counts_of_one(whole.front(), size, unit);
  if (whole.size() != to_size(size))
    throw UsageError(
        {.what = concat(whole.size(), " tensors for ", size, " ranks"), .next = "give one tensor per rank"});
  std::vector<std::size_t> each;
  for (const Tensor& part : whole) each.push_back(unit.count(part.numel()));
  const bool even = std::ranges::all_of(each, [&](std::size_t count) { return count == each.front(); });
  if (even) return {each.front(), {}};
  return {0, std::move(each)};
}

void check_part(const Tensor& part, const Tensor& whole, std::size_t count, Unit unit) {
  if (part.scalar_type() == whole.scalar_type() && unit.count(part.numel()) == count) return;
  throw UsageError(
      {.what = concat("this rank's part is ", part.numel(), " ", c10::toString(part.scalar_type()), ", but ",
                      count / unit.each, " ", c10::toString(whole.scalar_type()), " are its share of the whole"),
       .next = "give tensors that fit: the whole is the parts of all ranks"});
}

void check_equal_parts(const Tensors& whole, const Tensor& part, int size) {
  const Unit unit = unit_to_move(part);
  const Counts counts = counts_of(whole, size, unit);
  for (int rank = 0; rank < size; ++rank) check_part(part, whole.front(), counts.of(rank), unit);
}

void check_same_dtype(const Tensor& input, const Tensor& output) {
  if (input.scalar_type() == output.scalar_type()) return;
  throw UsageError({.what = concat("input of ", c10::toString(input.scalar_type()), ", output of ",
                                   c10::toString(output.scalar_type())),
                    .next = "convert them to one dtype"});
}

void check_pairs(const Tensors& outputs, const Tensors& inputs) {
  if (outputs.size() == inputs.size()) return;
  throw UsageError({.what = concat(outputs.size(), " output tensors for ", inputs.size(), " input tensors"),
                    .next = "give one output per input"});
}

std::vector<std::size_t> counts_of_tensors(const Tensors& tensors, int size) {
  if (tensors.size() != to_size(size))
    throw UsageError(
        {.what = concat(tensors.size(), " tensors for ", size, " ranks"), .next = "give one tensor per rank"});
  std::vector<std::size_t> counts;
  for (const Tensor& tensor : tensors) counts.push_back(unit_to_move(tensor).count(tensor.numel()));
  return counts;
}

std::vector<std::size_t> counts_of_rows(const Tensor& tensor, const std::vector<std::int64_t>& splits, int size,
                                        const char* what) {
  const std::int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  std::vector<std::int64_t> all = splits;
  if (all.empty()) all.assign(to_size(size), rows / size);
  std::int64_t sum = 0;
  for (const std::int64_t split : all) sum += split;
  const bool negative = std::ranges::any_of(all, [](std::int64_t split) { return split < 0; });
  if (negative || sum != rows || all.size() != to_size(size))
    throw UsageError({.what = concat("all_to_all can't split ", rows, " rows of ", what, " into ", all.size(),
                                     " parts of ", sum, " rows together for ", size, " ranks"),
                      .next = "give split sizes, one per rank, that add up to the first dimension"});
  const std::size_t row = rows > 0 ? unit_to_move(tensor).count(tensor.numel() / rows) : 0;
  std::vector<std::size_t> counts;
  for (const std::int64_t split : all) counts.push_back(to_size(split) * row);
  return counts;
}

}  // namespace lockstep::backend
