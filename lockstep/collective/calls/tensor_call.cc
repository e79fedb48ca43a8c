// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/calls/tensor_call.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using torch::Tensor;

bool is_dense(const Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj(); }

const std::byte* address_of(const Tensor& tensor) { return static_cast<const std::byte*>(tensor.const_data_ptr()); }

bool lie_together(at::TensorList tensors) {
  const std::byte* next = address_of(tensors.front());
  for (const Tensor& tensor : tensors) {
    if (!is_dense(tensor) || (tensor.numel() > 0 && address_of(tensor) != next)) return false;
    next += tensor.nbytes();
  }
  return true;
}

bool overlap(const Tensor& one, const Tensor& other) {
  if (!one.defined() || !other.defined() || one.device() != other.device()) return false;
  return address_of(one) < address_of(other) + other.nbytes() && address_of(other) < address_of(one) + one.nbytes();
}

// A list of tensors as one.
struct Array {
  Tensor memory;
  Tensors copied;  // that the memory is a copy of
};

Array array_of(at::TensorList tensors, bool must_copy = false) {
  if (tensors.empty()) return {};
  const Tensor& first = tensors.front();
  const bool in_place = !must_copy && lie_together(tensors);
  if (in_place && tensors.size() == 1) return {first, {}};
  int64_t elements = 0;
  for (const Tensor& tensor : tensors) elements += tensor.numel();
  const auto options = first.options().requires_grad(false);
  if (!in_place) return {torch::empty({elements}, options), tensors.vec()};
  return {torch::from_blob(
              const_cast<void*>(first.const_data_ptr()), {elements}, [kept = tensors.vec()](void*) {}, options),
          {}};
}

template <class Body>
void for_each_part(const Tensors& tensors, const Tensor& memory, const Body& body) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  int64_t begin = 0;
  for (const Tensor& tensor : tensors) {
    body(tensor, memory.view(-1).narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

}  // namespace

std::optional<DType> to_dtype(at::ScalarType dtype) {
  static constexpr std::array<at::ScalarType, kDTypes> kInOrderOfDType{
      at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
      at::kByte,  at::kShort,  at::kInt,  at::kLong,     at::kBool};
  const auto* const found = std::ranges::find(kInOrderOfDType, dtype);
  if (found == kInOrderOfDType.end()) return std::nullopt;
  return static_cast<DType>(found - kInOrderOfDType.begin());
}

void TensorCall::begin() const {
  for_each_part(copied_from, input_tensor, [](const Tensor& tensor, const Tensor& part) { part.copy_(tensor); });
}

void TensorCall::finish() const {
  for_each_part(copied_to, output_tensor, [](const Tensor& tensor, const Tensor& part) { tensor.copy_(part); });
}

TensorCall with_memory(Call call, at::TensorList inputs, at::TensorList outputs) {
  // First: asking for memory to write to may move a tensor that shares its memory until it is written.
  for (const Tensor& tensor : outputs) tensor.mutable_data_ptr();
  const bool in_place = call.operation != Operation::kAllToAll &&
                        std::ranges::equal(inputs, outputs, [](const auto& a, const auto& b) { return a.is_same(b); });
  Array output = array_of(outputs);
  Array input = in_place ? output : array_of(inputs);
  if (!in_place && overlap(input.memory, output.memory)) input = array_of(inputs, true);
  if (output.memory.defined()) call.output = output.memory.mutable_data_ptr();
  if (input.memory.defined()) call.input = input.memory.const_data_ptr();
  return {std::move(call),          std::move(input.memory),
          std::move(output.memory), outputs.empty() ? Tensor() : outputs.front(),
          std::move(input.copied),  std::move(output.copied)};
}

std::vector<size_t> counts_of_rows(const Tensor& tensor, const std::vector<int64_t>& rows, int ranks,
                                   const std::string& what) {
  const int64_t whole = tensor.dim() > 0 ? tensor.size(0) : 1;
  std::vector<int64_t> all = rows;
  if (all.empty()) all.assign(to_size(ranks), whole / ranks);
  const int64_t sum = std::accumulate(all.begin(), all.end(), int64_t{0});
  const bool negative = std::ranges::any_of(all, [](int64_t count) { return count < 0; });
  if (negative || sum != whole || all.size() != to_size(ranks))
    throw UsageError({.what = concat(what, ": can't cut ", whole, " rows into ", all.size(), " parts of ", sum,
                                     " rows together for ", ranks, " ranks"),
                      .next = "give a count for each rank that add up to the first dimension; without counts it has to "
                              "be a multiple of the number of ranks"});
  std::vector<size_t> counts;
  for (const int64_t count : all) counts.push_back(whole > 0 ? to_size(count * (tensor.numel() / whole)) : 0);
  return counts;
}

}  // namespace lockstep
