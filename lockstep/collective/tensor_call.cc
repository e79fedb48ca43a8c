// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/tensor_call.h"

#include <algorithm>
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

// `rows` of `tensor` per rank; none: equal parts.
void check_sum(const Caller& caller, const Sizes& rows, const torch::Tensor& tensor, const char* operation) {
  check_first_dimension(caller, tensor, operation);
  if (rows.empty() && tensor.size(0) % caller.size != 0)
    refuse(caller, concat(operation, " of ", tensor.size(0), " rows over ", caller.size, " ranks"),
           "give the rows of each rank, or a multiple of the number of ranks");
  if (rows.empty()) return;
  check_rows(caller, rows, operation);
  if (sum_of(rows) != tensor.size(0))
    refuse(caller, concat(operation, ": counts of ", sum_of(rows), " rows together for a tensor of ", tensor.size(0)),
           "give counts that add up to the first dimension");
}

// ---- Memory

bool is_dense(const torch::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj(); }

const std::byte* address_of(const torch::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

bool lie_together(const Tensors& tensors) {
  const std::byte* next = address_of(tensors.front());
  for (const torch::Tensor& tensor : tensors) {
    if (!is_dense(tensor) || (tensor.numel() > 0 && address_of(tensor) != next)) return false;
    next += tensor.nbytes();
  }
  return true;
}

bool overlap(const torch::Tensor& one, const torch::Tensor& other) {
  if (!one.defined() || !other.defined() || one.device() != other.device()) return false;
  return address_of(one) < address_of(other) + other.nbytes() && address_of(other) < address_of(one) + one.nbytes();
}

// A list of tensors as one.
struct Array {
  torch::Tensor memory;
  Tensors copied;  // that the memory is a copy of
};

Array array_of(const Tensors& tensors, bool must_copy = false) {
  if (tensors.empty()) return {};
  const torch::Tensor& first = tensors.front();
  const bool in_place = !must_copy && lie_together(tensors);
  if (in_place && tensors.size() == 1) return {first, {}};
  std::int64_t elements = 0;
  for (const torch::Tensor& tensor : tensors) elements += tensor.numel();
  const auto options = first.options().requires_grad(false);
  if (!in_place) return {torch::empty({elements}, options), tensors};
  return {torch::from_blob(
              const_cast<void*>(first.const_data_ptr()), {elements}, [tensors](void*) {}, options),
          {}};
}

template <class Body>
void for_each_part(const Tensors& tensors, const torch::Tensor& memory, const Body& body) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::int64_t begin = 0;
  for (const torch::Tensor& tensor : tensors) {
    body(tensor, memory.view(-1).narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

// ---- Shapes

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

// Without `input` or `output` where that is not defined.
TensorCall call_on(const Caller& caller, Call call, const torch::Tensor& input, const torch::Tensor& output) {
  const auto list_of = [](const torch::Tensor& tensor) { return tensor.defined() ? Tensors{tensor} : Tensors(); };
  if (output.defined()) check_written(caller, output, call.operation);
  call.dtype = *to_dtype((output.defined() ? output : input).scalar_type());
  return with_memory(std::move(call), list_of(input), list_of(output));
}

// Where a result goes that is `like` the input, but for its shape: into `given`, or into a new tensor.
torch::Tensor output_for(const Caller& caller, const torch::Tensor& like, const torch::Tensor& given,
                         const Sizes& shape) {
  if (!given.defined()) return torch::empty(shape, like.options().requires_grad(false));
  const bool fits = given.sizes() == torch::IntArrayRef(shape) && given.scalar_type() == like.scalar_type() &&
                    given.device() == like.device();
  if (!fits)
    refuse(caller,
           concat("an output of shape ", given.sizes(), " ", c10::toString(given.scalar_type()), ", but ",
                  torch::IntArrayRef(shape), " ", c10::toString(like.scalar_type()), " is the result"),
           "give it that shape and dtype, or none");
  return given;
}

}  // namespace

void require_device(const torch::Tensor& tensor, torch::Device device, const std::string& name) {
  const bool same_type = tensor.device().type() == device.type();
  if (same_type && (!device.has_index() || tensor.device().index() == device.index())) return;
  throw DeviceError({.what = concat(name, " is on ", tensor.device().str(), ", but ", device.str(), " is needed"),
                     .likely = "a tensor or a module that was not moved",
                     .next = "call .to(world.device()) on it first"});
}

void TensorCall::begin() const {
  for_each_part(copied_from, input, [](const torch::Tensor& tensor, const torch::Tensor& part) { part.copy_(tensor); });
}

void TensorCall::finish() const {
  for_each_part(copied_to, output, [](const torch::Tensor& tensor, const torch::Tensor& part) { tensor.copy_(part); });
}

TensorCall with_memory(Call call, const Tensors& inputs, const Tensors& outputs) {
  // First: asking for memory to write to may move a tensor that shares its memory until it is written.
  for (const torch::Tensor& tensor : outputs) tensor.mutable_data_ptr();
  const bool in_place = call.operation != Operation::kAllToAll &&
                        std::ranges::equal(inputs, outputs, [](const auto& a, const auto& b) { return a.is_same(b); });
  const Array output = array_of(outputs);
  Array input = in_place ? output : array_of(inputs);
  if (!in_place && overlap(input.memory, output.memory)) input = array_of(inputs, true);
  if (output.memory.defined()) call.output = output.memory.mutable_data_ptr();
  if (input.memory.defined()) call.input = input.memory.const_data_ptr();
  return {.call = std::move(call),
          .input = input.memory,
          .output = output.memory,
          .result = outputs.empty() ? torch::Tensor() : outputs.front(),
          .copied_from = input.copied,
          .copied_to = output.copied};
}

TensorCall barrier_call() { return {.call = {.operation = Operation::kBarrier}}; }

TensorCall all_reduce_call(const Caller& caller, const torch::Tensor& tensor, const AllReduceOptions& options) {
  check_tensor(caller, tensor, "all_reduce");
  check_op(caller, tensor, options.op);
  const Call call{.operation = Operation::kAllReduce,
                  .count = to_size(tensor.numel()),
                  .op = options.op,
                  .algorithm = options.algorithm};
  return call_on(caller, call, tensor, tensor);
}

TensorCall reduce_call(const Caller& caller, const torch::Tensor& tensor, const ReduceOptions& options) {
  check_tensor(caller, tensor, "reduce");
  check_op(caller, tensor, options.op);
  check_rank(caller, "root", options.root);
  const Call call{
      .operation = Operation::kReduce, .count = to_size(tensor.numel()), .op = options.op, .root = options.root};
  return call_on(caller, call, tensor, options.root == caller.rank ? tensor : torch::Tensor());
}

TensorCall reduce_scatter_call(const Caller& caller, const torch::Tensor& tensor, const ReduceScatterOptions& options) {
  check_tensor(caller, tensor, "reduce_scatter");
  check_op(caller, tensor, options.op);
  check_sum(caller, options.rows, tensor, "reduce_scatter");
  const std::int64_t mine = options.rows.empty() ? tensor.size(0) / caller.size : options.rows[to_size(caller.rank)];
  const torch::Tensor output = output_for(caller, tensor, options.output, with_rows(mine, tensor));
  const Call call{.operation = Operation::kReduceScatter,
                  .count = to_size(output.numel()),
                  .counts = counts_of(options.rows, tensor),
                  .op = options.op};
  return call_on(caller, call, tensor, output);
}

TensorCall all_gather_call(const Caller& caller, const torch::Tensor& tensor, const AllGatherOptions& options) {
  check_tensor(caller, tensor, "all_gather");
  const Call call{.operation = Operation::kAllGather, .count = to_size(tensor.numel())};
  return call_on(caller, call, tensor, output_for(caller, tensor, options.output, with_ranks(caller, tensor)));
}

TensorCall all_gather_rows_call(const Caller& caller, const torch::Tensor& tensor,
                                const AllGatherRowsOptions& options) {
  check_tensor(caller, tensor, "all_gather_rows");
  check_first_dimension(caller, tensor, "all_gather_rows");
  check_rows(caller, options.rows, "all_gather_rows");
  const std::int64_t mine = options.rows[to_size(caller.rank)];
  if (mine != tensor.size(0))
    refuse(caller, concat("all_gather_rows of ", tensor.size(0), " rows, but ", mine, " are announced for this rank"),
           "give the same counts on all ranks, or none");
  const Call call{
      .operation = Operation::kAllGather, .count = to_size(tensor.numel()), .counts = counts_of(options.rows, tensor)};
  return call_on(caller, call, tensor,
                 output_for(caller, tensor, options.output, with_rows(sum_of(options.rows), tensor)));
}

TensorCall broadcast_call(const Caller& caller, const torch::Tensor& tensor, int root) {
  check_tensor(caller, tensor, "broadcast");
  check_rank(caller, "root", root);
  const Call call{.operation = Operation::kBroadcast, .count = to_size(tensor.numel()), .root = root};
  return call_on(caller, call, tensor, tensor);
}

TensorCall gather_call(const Caller& caller, const torch::Tensor& tensor, int root) {
  check_tensor(caller, tensor, "gather");
  check_rank(caller, "root", root);
  torch::Tensor output;
  if (root == caller.rank) output = output_for(caller, tensor, {}, with_ranks(caller, tensor));
  const Call call{.operation = Operation::kGather, .count = to_size(tensor.numel()), .root = root};
  return call_on(caller, call, tensor, output);
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
  const Call call{.operation = Operation::kScatter, .count = to_size(output.numel()), .root = root};
  return call_on(caller, call, at_root ? parts : torch::Tensor(), output);
}

TensorCall all_to_all_call(const Caller& caller, const torch::Tensor& tensor, const AllToAllOptions& options) {
  check_tensor(caller, tensor, "all_to_all");
  const bool even = options.send_rows.empty();
  if (even != options.receive_rows.empty())
    refuse(caller, "all_to_all with one list of counts", "give send_rows and receive_rows, or neither");
  check_sum(caller, options.send_rows, tensor, "all_to_all");
  if (!even) check_rows(caller, options.receive_rows, "all_to_all");
  const Sizes shape = with_rows(even ? tensor.size(0) : sum_of(options.receive_rows), tensor);
  const Call call{.operation = Operation::kAllToAll,
                  .count = to_size(tensor.numel() / caller.size),
                  .counts = counts_of(options.send_rows, tensor),
                  .receive_counts = counts_of(options.receive_rows, tensor)};
  return call_on(caller, call, tensor, output_for(caller, tensor, options.output, shape));
}

TensorCall send_call(const Caller& caller, const torch::Tensor& tensor, int to, int tag) {
  check_tensor(caller, tensor, "send");
  check_rank(caller, "to", to);
  check_message(caller, "to", to, tag);
  const Call call{.operation = Operation::kSend, .count = to_size(tensor.numel()), .peer = to, .tag = tag};
  return call_on(caller, call, tensor, {});
}

TensorCall receive_call(const Caller& caller, const torch::Tensor& tensor, const ReceiveOptions& options) {
  check_tensor(caller, tensor, "receive");
  check_message(caller, "from", options.from, options.tag);
  const Call call{
      .operation = Operation::kReceive, .count = to_size(tensor.numel()), .peer = options.from, .tag = options.tag};
  return call_on(caller, call, {}, tensor);
}

}  // namespace lockstep
