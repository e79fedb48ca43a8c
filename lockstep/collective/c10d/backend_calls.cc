// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend_calls.h"

namespace lockstep::backend {
namespace {

void check_tensor(const Tensor& tensor, at::ScalarType dtype) {
  require_cpu(tensor);
  if (tensor.layout() != at::kStrided)
    throw UsageError({.what = concat("a tensor of layout ", c10::str(tensor.layout()), " can't be exchanged"),
                      .next = "call to_dense() first; all_reduce also takes layout Sparse (COO)"});
  if (tensor.scalar_type() != dtype)
    throw UsageError({.what = concat("one call with tensors of ", c10::toString(tensor.scalar_type()), " and of ",
                                     c10::toString(dtype)),
                      .next = "convert them to one dtype"});
}

// Some tensor of a call, of which there is one at least: all of them have its dtype.
const Tensor& checked(const Tensors& inputs, const Tensors& outputs) {
  const Tensor& some = outputs.empty() ? inputs.front() : outputs.front();
  for (const Tensors* list : {&inputs, &outputs})
    for (const Tensor& tensor : *list) check_tensor(tensor, some.scalar_type());
  return some;
}

// Tells how elements of a tensor travel: `each` elements of `dtype` per element of torch's.
struct Unit {
  DType dtype;
  size_t each = 1;
};

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

ReduceOp to_reduce_op(const c10d::ReduceOp& op) {
  static_assert(int{c10d::ReduceOp::BXOR} == static_cast<int>(ReduceOp::kBitXor), "reductions are in c10d's order");
  if (op.op_ <= c10d::ReduceOp::BXOR) return static_cast<ReduceOp>(op.op_);
  throw UsageError({.what = "a reduction that the lockstep backend does not have",
                    .next = "use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR"});
}

// The elements of each rank's part: a tensor each, or one tensor for all in equal parts.
std::vector<size_t> counts_of_parts(const Tensors& whole, int size) {
  if (whole.size() != 1) return counts_of_tensors(whole, size);
  const int64_t elements = whole.front().numel();
  if (elements % size == 0) return std::vector<size_t>(to_size(size), to_size(elements / size));
  throw UsageError({.what = concat("a tensor of ", elements, " elements can't be split evenly over ", size, " ranks"),
                    .next = "make its size a multiple of the number of ranks"});
}

void check_part(const Tensor& part, size_t count) {
  if (to_size(part.numel()) == count) return;
  throw UsageError(
      {.what = concat("this rank's part has ", part.numel(), " elements, but its share of the whole is ", count),
       .next = "give tensors that fit: the whole has the elements of all parts"});
}

void set_counts(Call& call, GroupRank member, const Tensors& inputs, const Tensors& outputs) {
  if (call.operation == Operation::kAllToAll) return;
  const bool gathers = call.operation == Operation::kAllGather || call.operation == Operation::kGather;
  const Tensor& part = gathers || outputs.empty() ? inputs.front() : outputs.front();
  call.count = to_size(part.numel());
  const bool has_root = call.operation == Operation::kGather || call.operation == Operation::kScatter;
  const bool has_whole = has_root ? call.root == member.rank : gathers || call.operation == Operation::kReduceScatter;
  if (!has_whole) return;
  std::vector<size_t> counts = counts_of_parts(gathers ? outputs : inputs, member.size);
  check_part(part, counts[to_size(member.rank)]);
  if (std::ranges::count(counts, counts.front()) == member.size) return;
  if (has_root) std::ranges::for_each(counts, [&](size_t count) { check_part(part, count); });
  call.counts = std::move(counts);
}

TensorCall call_on(GroupRank member, Call call, const Tensors& inputs, const Tensors& outputs, Unit unit) {
  set_counts(call, member, inputs, outputs);
  call.dtype = unit.dtype;
  call.count *= unit.each;
  for (size_t& count : call.counts) count *= unit.each;
  for (size_t& count : call.receive_counts) count *= unit.each;
  return with_memory(std::move(call), inputs, outputs);
}

void require_apart(const Tensors& outputs) {
  std::vector<std::pair<const char*, const char*>> places;  // with gaps: of the first element; others may lie between
  for (const Tensor& output : outputs) {
    if (output.numel() == 0) continue;
    const auto* const begin = static_cast<const char*>(output.const_data_ptr());
    places.emplace_back(begin, begin + (output.is_non_overlapping_and_dense() ? output.nbytes() : output.itemsize()));
  }
  std::ranges::sort(places);
  for (size_t i = 1; i < places.size(); ++i)
    if (places[i].first < places[i - 1].second)
      throw UsageError({.what = "output tensors that overlap in memory",
                        .likely = "one tensor that is given for several ranks, such as [tensor] * size",
                        .next = "give each rank a tensor of its own"});
}

}  // namespace

void require_cpu(const Tensor& tensor) {
  if (!tensor.is_cpu())
    throw DeviceError({.what = concat("a tensor on ", tensor.device().str(), " was given to the lockstep backend"),
                       .likely = "a model on a GPU in a process group that is for the CPU only",
                       .next = "move it to the CPU, or use init_process_group(\"cpu:lockstep,cuda:nccl\")"});
}

TensorCall call_to_move(GroupRank member, Call call, const Tensors& inputs, const Tensors& outputs) {
  const Unit unit = unit_to_move(checked(inputs, outputs));
  require_apart(outputs);
  return call_on(member, std::move(call), inputs, outputs, unit);
}

TensorCall call_to_reduce(GroupRank member, Call call, const Tensors& inputs, const Tensors& outputs,
                          const c10d::ReduceOp& op) {
  const Unit unit = unit_to_reduce(checked(inputs, outputs), op);
  call.op = to_reduce_op(op);
  return call_on(member, std::move(call), inputs, outputs, unit);
}

void run_to_its_end(Transport& transport, const TensorCall& call) {
  call.begin();
  transport.run(call);
  call.finish();
}

std::vector<size_t> counts_of_tensors(const Tensors& tensors, int size) {
  require_number(tensors.size(), to_size(size));
  std::vector<size_t> counts;
  for (const Tensor& tensor : tensors) counts.push_back(to_size(tensor.numel()));
  return counts;
}

void require_number(size_t given, size_t wanted) {
  if (given != wanted)
    throw UsageError({.what = concat(given, " tensors, or lists of tensors, where ", wanted, " are needed"),
                      .next =
                          "give one for each rank, one output for each input, or one in all: what is coalesced takes "
                          "more"});
}

}  // namespace lockstep::backend
