// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/tensor_call.h"

#include <numeric>
#include <utility>

#include <ATen/MemoryOverlap.h>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/torch_dtype.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Sizes = std::vector<std::int64_t>;

[[noreturn]] void refuse(const Caller& caller, const std::string& what, const std::string& next) {
  throw UsageError({.what = what, .here = caller.here, .next = next});
}

// ---- Arguments

// Also in a world of one: what would fail on many ranks fails on one.
void check_tensor(const Caller& caller, const torch::Tensor& tensor, const char* operation) {
  if (!tensor.defined()) refuse(caller, concat(operation, " was given an undefined tensor"), "give it a tensor");
  if (!tensor.is_cpu()) require_device(tensor, caller.device, concat("the tensor given to ", operation));
  if (tensor.layout() != torch::kStrided)
    refuse(caller, concat(operation, " of a tensor of layout ", c10::str(tensor.layout())),
           "call to_dense() on it first");
  if (!to_dtype(tensor.scalar_type()))
    refuse(caller, concat(operation, ": tensors of ", c10::toString(tensor.scalar_type()), " can't be exchanged"),
           "exchange real and imaginary parts, or another dtype");
}

void check_op(const Caller& caller, const torch::Tensor& tensor, ReduceOp op) {
  const bool mean_of_integers = op == ReduceOp::kMean && !tensor.is_floating_point();
  if (!mean_of_integers && shm::defined(*to_dtype(tensor.scalar_type()), op)) return;
  refuse(caller, concat(to_string(op), " is not defined for ", c10::toString(tensor.scalar_type())),
         "convert the tensor, or choose another op");
}

void check_rank(const Caller& caller, const char* what, int rank) {
  if (rank < 0 || rank >= caller.size)
    refuse(caller, concat(what, " ", rank, " of ", caller.size, " ranks"), "name a rank of this world");
}

void check_message(const Caller& caller, const char* what, int peer, int tag) {
  if (peer != kAnyRank) check_rank(caller, what, peer);
  if (peer == caller.rank || caller.size == 1)
    refuse(caller, "a message of a rank to itself", "name another rank of this world");
  if (tag < 0) refuse(caller, concat("a message with tag ", tag), "use tags from 0 up");
}

void check_written(const Caller& caller, const torch::Tensor& tensor, Operation operation) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    refuse(caller,
           concat(to_string(operation), " into a tensor whose elements share memory: shape ", tensor.sizes(),
                  ", strides ", tensor.strides()),
           "give it a tensor that was not expanded");
}

void check_first_dimension(const Caller& caller, const torch::Tensor& tensor, const char* operation) {
  if (tensor.dim() == 0)
    refuse(caller, concat(operation, " of a tensor without dimensions"), "give it rows: unsqueeze(0)");
}

void check_rows(const Caller& caller, const Sizes& rows, const char* what) {
  const bool negative = std::ranges::any_of(rows, [](std::int64_t count) { return count < 0; });
  if (std::cmp_not_equal(rows.size(), caller.size) || negative)
    refuse(caller, concat(what, ": ", rows.size(), " counts for ", caller.size, " ranks, or a negative one"),
           "give one count per rank");
}

std::int64_t sum_of(const Sizes& rows) { return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}); }

void check_sum(const Caller& caller, const Sizes& rows, const torch::Tensor& tensor, const char* what) {
  check_rows(caller, rows, what);
  if (sum_of(rows) != tensor.size(0))
    refuse(caller, concat(what, ": counts of ", sum_of(rows), " rows together for a tensor of ", tensor.size(0)),
           "give counts that add up to the first dimension");
}

void check_divisible(const Caller& caller, const torch::Tensor& tensor, const char* operation) {
  if (tensor.size(0) % caller.size != 0)
    refuse(caller, concat(operation, " of ", tensor.size(0), " rows over ", caller.size, " ranks"),
           "give the rows of each rank, or a multiple of the number of ranks");
}

// ---- Memory

bool has_gaps(const torch::Tensor& tensor) { return !tensor.is_contiguous() || tensor.is_neg(); }

torch::Tensor without_gaps(const torch::Tensor& tensor) {
  return has_gaps(tensor) ? tensor.detach().resolve_neg().contiguous() : tensor;
}

bool overlap(const torch::Tensor& one, const torch::Tensor& other) {
  if (one.device() != other.device()) return false;
  const auto* const a = static_cast<const std::byte*>(one.const_data_ptr());
  const auto* const b = static_cast<const std::byte*>(other.const_data_ptr());
  return a < b + other.nbytes() && b < a + one.nbytes();
}

Sizes with_rows(std::int64_t rows, const torch::Tensor& tensor) {
  Sizes shape = tensor.sizes().vec();
  shape.front() = rows;
  return shape;
}

Sizes with_ranks(const Caller& caller, const torch::Tensor& tensor) {
  Sizes shape = tensor.sizes().vec();
  shape.insert(shape.begin(), caller.size);
  return shape;
}

std::int64_t row_elements(const torch::Tensor& tensor) { return c10::multiply_integers(tensor.sizes().slice(1)); }

// The elements of each rank's part.
std::vector<std::size_t> counts_of(const Sizes& rows, const torch::Tensor& tensor) {
  std::vector<std::size_t> counts;
  for (const std::int64_t count : rows) counts.push_back(to_size(count * row_elements(tensor)));
  return counts;
}

// ---- Calls

TensorCall call_of(Operation operation, const torch::Tensor& input) {
  TensorCall made;
  made.call.operation = operation;
  if (input.defined()) made.input = without_gaps(input);
  return made;
}

// The result goes into `tensor`, which holds the input too where `reads` is true.
void write_to(TensorCall& made, const Caller& caller, const torch::Tensor& tensor, bool reads) {
  check_written(caller, tensor, made.call.operation);
  made.result = made.output = tensor;
  made.copy_back = has_gaps(tensor);
  if (made.copy_back)
    made.output = reads ? without_gaps(tensor) : torch::empty(tensor.sizes(), tensor.options().requires_grad(false));
}

TensorCall in_place(Operation operation, const Caller& caller, const torch::Tensor& tensor) {
  TensorCall made;
  made.call.operation = operation;
  write_to(made, caller, tensor, true);
  made.input = made.output;
  return made;
}

// The transports take input and output that are the same memory or do not overlap.
void separate_input(TensorCall& made) {
  if (overlap(made.input, made.output)) made.input = made.input.detach().clone();
}

// The result goes into `given`, or into a new tensor.
void write_result(TensorCall& made, const Caller& caller, const torch::Tensor& given, const Sizes& shape) {
  const torch::Tensor& like = made.input;
  if (!given.defined()) {
    made.result = made.output = torch::empty(shape, like.options().requires_grad(false));
    return;
  }
  const bool fits = given.sizes() == torch::IntArrayRef(shape) && given.scalar_type() == like.scalar_type() &&
                    given.device() == like.device();
  if (!fits)
    refuse(caller,
           concat("an output of shape ", given.sizes(), " ", c10::toString(given.scalar_type()), ", but ",
                  torch::IntArrayRef(shape), " ", c10::toString(like.scalar_type()), " is the result"),
           "give it that shape and dtype, or none");
  write_to(made, caller, given, false);
  separate_input(made);
}

// Once the tensors are known. The output first: asking for memory to write to may move a tensor that shares its memory
// until it is written.
TensorCall with_memory(TensorCall made, std::int64_t elements) {
  const torch::Tensor& some = made.output.defined() ? made.output : made.input;
  made.call.dtype = *to_dtype(some.scalar_type());
  made.call.count = to_size(elements);
  if (made.output.defined()) made.call.output = made.output.mutable_data_ptr();
  if (made.input.defined()) made.call.input = made.input.const_data_ptr();
  return made;
}

}  // namespace

void TensorCall::finish() const {
  if (!copy_back) return;
  const torch::NoGradGuard no_grad;
  result.copy_(output);
}

TensorCall barrier_call() { return {.call = {.operation = Operation::kBarrier}}; }

TensorCall all_reduce_call(const Caller& caller, const torch::Tensor& tensor, const AllReduceOptions& options) {
  check_tensor(caller, tensor, "all_reduce");
  check_op(caller, tensor, options.op);
  TensorCall made = in_place(Operation::kAllReduce, caller, tensor);
  made.call.op = options.op;
  made.call.algorithm = options.algorithm;
  return with_memory(std::move(made), tensor.numel());
}

TensorCall reduce_call(const Caller& caller, const torch::Tensor& tensor, const ReduceOptions& options) {
  check_tensor(caller, tensor, "reduce");
  check_op(caller, tensor, options.op);
  check_rank(caller, "root", options.root);
  const bool at_root = options.root == caller.rank;
  TensorCall made = at_root ? in_place(Operation::kReduce, caller, tensor) : call_of(Operation::kReduce, tensor);
  made.call.op = options.op;
  made.call.root = options.root;
  return with_memory(std::move(made), tensor.numel());
}

TensorCall reduce_scatter_call(const Caller& caller, const torch::Tensor& tensor, const ReduceScatterOptions& options) {
  check_tensor(caller, tensor, "reduce_scatter");
  check_op(caller, tensor, options.op);
  check_first_dimension(caller, tensor, "reduce_scatter");
  const bool even = options.rows.empty();
  if (even)
    check_divisible(caller, tensor, "reduce_scatter");
  else
    check_sum(caller, options.rows, tensor, "reduce_scatter");
  TensorCall made = call_of(Operation::kReduceScatter, tensor);
  made.call.op = options.op;
  made.call.counts = counts_of(options.rows, tensor);
  const std::int64_t mine = even ? tensor.size(0) / caller.size : options.rows[static_cast<unsigned>(caller.rank)];
  write_result(made, caller, options.output, with_rows(mine, tensor));
  return with_memory(std::move(made), mine * row_elements(tensor));
}

TensorCall all_gather_call(const Caller& caller, const torch::Tensor& tensor, const AllGatherOptions& options) {
  check_tensor(caller, tensor, "all_gather");
  TensorCall made = call_of(Operation::kAllGather, tensor);
  write_result(made, caller, options.output, with_ranks(caller, tensor));
  return with_memory(std::move(made), tensor.numel());
}

TensorCall all_gather_rows_call(const Caller& caller, const torch::Tensor& tensor,
                                const AllGatherRowsOptions& options) {
  check_tensor(caller, tensor, "all_gather_rows");
  check_first_dimension(caller, tensor, "all_gather_rows");
  check_rows(caller, options.rows, "all_gather_rows");
  const std::int64_t mine = options.rows[static_cast<unsigned>(caller.rank)];
  if (mine != tensor.size(0))
    refuse(caller, concat("all_gather_rows of ", tensor.size(0), " rows, but ", mine, " are announced for this rank"),
           "give the same counts on all ranks, or none");
  TensorCall made = call_of(Operation::kAllGather, tensor);
  made.call.counts = counts_of(options.rows, tensor);
  write_result(made, caller, options.output, with_rows(sum_of(options.rows), tensor));
  return with_memory(std::move(made), tensor.numel());
}

TensorCall broadcast_call(const Caller& caller, const torch::Tensor& tensor, int root) {
  check_tensor(caller, tensor, "broadcast");
  check_rank(caller, "root", root);
  TensorCall made = in_place(Operation::kBroadcast, caller, tensor);
  if (root == caller.rank) made.copy_back = false;  // it has what it sends
  made.call.root = root;
  return with_memory(std::move(made), tensor.numel());
}

TensorCall gather_call(const Caller& caller, const torch::Tensor& tensor, int root) {
  check_tensor(caller, tensor, "gather");
  check_rank(caller, "root", root);
  TensorCall made = call_of(Operation::kGather, tensor);
  made.call.root = root;
  if (root == caller.rank) write_result(made, caller, {}, with_ranks(caller, tensor));
  return with_memory(std::move(made), tensor.numel());
}

TensorCall scatter_call(const Caller& caller, const torch::Tensor& parts, const torch::Tensor& output, int root) {
  check_tensor(caller, output, "scatter");
  check_rank(caller, "root", root);
  const bool at_root = root == caller.rank;
  if (at_root) check_tensor(caller, parts, "scatter");
  if (at_root && (parts.sizes() != torch::IntArrayRef(with_ranks(caller, output)) || parts.dtype() != output.dtype()))
    refuse(caller,
           concat("scatter of parts of shape ", parts.sizes(), " ", c10::toString(parts.scalar_type()), " into ",
                  output.sizes(), " ", c10::toString(output.scalar_type())),
           "give parts of one dtype and shape (number of ranks, ...)");
  TensorCall made = call_of(Operation::kScatter, at_root ? parts : torch::Tensor());
  made.call.root = root;
  write_to(made, caller, output, false);
  if (at_root) separate_input(made);
  return with_memory(std::move(made), output.numel());
}

TensorCall all_to_all_call(const Caller& caller, const torch::Tensor& tensor, const AllToAllOptions& options) {
  check_tensor(caller, tensor, "all_to_all");
  check_first_dimension(caller, tensor, "all_to_all");
  const bool even = options.send_rows.empty();
  if (even != options.receive_rows.empty())
    refuse(caller, "all_to_all with one list of counts", "give send_rows and receive_rows, or neither");
  if (even)
    check_divisible(caller, tensor, "all_to_all");
  else
    check_sum(caller, options.send_rows, tensor, "all_to_all");
  if (!even) check_rows(caller, options.receive_rows, "all_to_all");
  TensorCall made = call_of(Operation::kAllToAll, tensor);
  made.call.counts = counts_of(options.send_rows, tensor);
  made.call.receive_counts = counts_of(options.receive_rows, tensor);
  write_result(made, caller, options.output, with_rows(even ? tensor.size(0) : sum_of(options.receive_rows), tensor));
  return with_memory(std::move(made), tensor.numel() / caller.size);
}

TensorCall send_call(const Caller& caller, const torch::Tensor& tensor, int to, int tag) {
  check_tensor(caller, tensor, "send");
  check_rank(caller, "to", to);
  check_message(caller, "to", to, tag);
  TensorCall made = call_of(Operation::kSend, tensor);
  made.call.peer = to;
  made.call.tag = tag;
  return with_memory(std::move(made), tensor.numel());
}

TensorCall receive_call(const Caller& caller, const torch::Tensor& tensor, const ReceiveOptions& options) {
  check_tensor(caller, tensor, "receive");
  check_message(caller, "from", options.from, options.tag);
  TensorCall made;
  made.call.operation = Operation::kReceive;
  made.call.peer = options.from;
  made.call.tag = options.tag;
  write_to(made, caller, tensor, false);
  return with_memory(std::move(made), tensor.numel());
}

}  // namespace lockstep
