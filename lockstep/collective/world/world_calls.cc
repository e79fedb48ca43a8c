// SPDX-License-Identifier: Apache-2.0
// World's collectives and messages: each checks what only torch knows of this rank's arguments, and makes a TensorCall.
// The transports check the rest (check_call).
#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/MemoryOverlap.h>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/world/world_state.h"
#include "lockstep/error.h"
#include "lockstep/world.h"

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

// For floating point alone a mean is what all take it for.
void check_mean(const Caller& caller, const torch::Tensor& tensor, ReduceOp op) {
  if (op == ReduceOp::kMean && !tensor.is_floating_point())
    refuse(caller, concat("mean is not defined for ", c10::toString(tensor.scalar_type())),
           "convert the tensor, or choose another op");
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

// ---- Results

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

// Without `input` or `output` where that is not defined.
TensorCall call_on(const Caller& caller, Call call, const torch::Tensor& input, const torch::Tensor& output) {
  const auto list_of = [](const torch::Tensor& tensor) { return at::TensorList(&tensor, tensor.defined() ? 1 : 0); };
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

TensorCall all_reduce_call(const Caller& caller, const torch::Tensor& tensor, const AllReduceOptions& options) {
  check_tensor(caller, tensor, "all_reduce");
  check_mean(caller, tensor, options.op);
  const Call call{.operation = Operation::kAllReduce,
                  .count = to_size(tensor.numel()),
                  .op = options.op,
                  .algorithm = options.algorithm};
  return call_on(caller, call, tensor, tensor);
}

TensorCall reduce_scatter_call(const Caller& caller, const torch::Tensor& tensor, const ReduceScatterOptions& options) {
  check_tensor(caller, tensor, "reduce_scatter");
  check_mean(caller, tensor, options.op);
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

TensorCall broadcast_call(const Caller& caller, const torch::Tensor& tensor, int root) {
  check_tensor(caller, tensor, "broadcast");
  const Call call{.operation = Operation::kBroadcast, .count = to_size(tensor.numel()), .root = root};
  return call_on(caller, call, tensor, tensor);
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

TensorCall message_call(const Caller& caller, Operation operation, const torch::Tensor& tensor, int peer, int tag) {
  const bool sends = operation == Operation::kSend;
  check_tensor(caller, tensor, sends ? "send" : "receive");
  if (peer == caller.rank || caller.size == 1)
    refuse(caller, "a message of a rank to itself", "name another rank of this world");
  if (tag < 0) refuse(caller, concat("a message with tag ", tag), "use tags from 0 up");
  const Call call{.operation = operation, .count = to_size(tensor.numel()), .peer = peer, .tag = tag};
  return sends ? call_on(caller, call, tensor, {}) : call_on(caller, call, {}, tensor);
}

std::vector<std::int64_t> values_of(const torch::Tensor& tensor) {
  const auto* const values = tensor.const_data_ptr<std::int64_t>();
  return {values, values + tensor.numel()};
}

}  // namespace

torch::Tensor World::run(const TensorCall& call) const {
  call.begin();
  if (is_message(call.call.operation))
    state_->run_message(call);
  else
    state_->transport_for(call).run(call);
  call.finish();
  return call.result;
}

void World::all_reduce(const torch::Tensor& tensor, const AllReduceOptions& options) const {
  run(all_reduce_call(state_->caller, tensor, options));
}
Work World::all_reduce_async(const torch::Tensor& tensor, const AllReduceOptions& options) const {
  return start(all_reduce_call(state_->caller, tensor, options));
}

void World::reduce(const torch::Tensor& tensor, const ReduceOptions& options) const {
  const Caller& caller = state_->caller;
  check_tensor(caller, tensor, "reduce");
  check_mean(caller, tensor, options.op);
  const Call call{
      .operation = Operation::kReduce, .count = to_size(tensor.numel()), .op = options.op, .root = options.root};
  run(call_on(caller, call, tensor, options.root == caller.rank ? tensor : torch::Tensor()));
}

torch::Tensor World::reduce_scatter(const torch::Tensor& tensor, const ReduceScatterOptions& options) const {
  return run(reduce_scatter_call(state_->caller, tensor, options));
}
Work World::reduce_scatter_async(const torch::Tensor& tensor, const ReduceScatterOptions& options) const {
  return start(reduce_scatter_call(state_->caller, tensor, options));
}

torch::Tensor World::all_gather(const torch::Tensor& tensor, const AllGatherOptions& options) const {
  return run(all_gather_call(state_->caller, tensor, options));
}
Work World::all_gather_async(const torch::Tensor& tensor, const AllGatherOptions& options) const {
  return start(all_gather_call(state_->caller, tensor, options));
}

void World::broadcast(const torch::Tensor& tensor, int root) const {
  run(broadcast_call(state_->caller, tensor, root));
}
Work World::broadcast_async(const torch::Tensor& tensor, int root) const {
  return start(broadcast_call(state_->caller, tensor, root));
}

torch::Tensor World::gather(const torch::Tensor& tensor, int root) const {
  const Caller& caller = state_->caller;
  check_tensor(caller, tensor, "gather");
  torch::Tensor output;
  if (root == caller.rank) output = output_for(caller, tensor, {}, with_ranks(caller, tensor));
  const Call call{.operation = Operation::kGather, .count = to_size(tensor.numel()), .root = root};
  return run(call_on(caller, call, tensor, output));
}

void World::scatter(const torch::Tensor& parts, const torch::Tensor& output, int root) const {
  const Caller& caller = state_->caller;
  check_tensor(caller, output, "scatter");
  const bool at_root = root == caller.rank;
  if (at_root) check_tensor(caller, parts, "scatter");
  if (at_root && (parts.sizes() != torch::IntArrayRef(with_ranks(caller, output)) || parts.dtype() != output.dtype()))
    refuse(caller,
           concat("scatter of parts of shape ", parts.sizes(), " ", c10::toString(parts.scalar_type()), " into ",
                  output.sizes(), " ", c10::toString(output.scalar_type())),
           "give parts of one dtype and shape (number of ranks, ...)");
  const Call call{.operation = Operation::kScatter, .count = to_size(output.numel()), .root = root};
  run(call_on(caller, call, at_root ? parts : torch::Tensor(), output));
}

void World::barrier() const { run({.call = {.operation = Operation::kBarrier}}); }

torch::Tensor World::all_gather_rows(const torch::Tensor& tensor, const AllGatherRowsOptions& options) const {
  const Caller& caller = state_->caller;
  check_tensor(caller, tensor, "all_gather_rows");
  check_first_dimension(caller, tensor, "all_gather_rows");
  const Sizes rows = options.rows.empty() ? values_of(all_gather(torch::tensor({tensor.size(0)}))) : options.rows;
  check_rows(caller, rows, "all_gather_rows");
  const std::int64_t mine = rows[to_size(caller.rank)];
  if (mine != tensor.size(0))
    refuse(caller, concat("all_gather_rows of ", tensor.size(0), " rows, but ", mine, " are announced for this rank"),
           "give the same counts on all ranks, or none");
  const Call call{
      .operation = Operation::kAllGather, .count = to_size(tensor.numel()), .counts = counts_of(rows, tensor)};
  return run(
      call_on(caller, call, tensor, output_for(caller, tensor, options.output, with_rows(sum_of(rows), tensor))));
}

torch::Tensor World::all_to_all(const torch::Tensor& tensor, const AllToAllOptions& options) const {
  AllToAllOptions known = options;
  if (known.receive_rows.empty() && !known.send_rows.empty())
    known.receive_rows = values_of(all_to_all(torch::tensor(known.send_rows)));
  return run(all_to_all_call(state_->caller, tensor, known));
}

Work World::all_to_all_async(const torch::Tensor& tensor, const AllToAllOptions& options) const {
  return start(all_to_all_call(state_->caller, tensor, options));
}

void World::weighted_mean(const torch::Tensor& tensor, double weight) const {
  const torch::NoGradGuard no_grad;
  if (!tensor.is_floating_point() || !(weight >= 0))
    throw UsageError({.what = concat("weighted_mean of ", c10::toString(tensor.scalar_type()), " with weight ", weight),
                      .here = describe(),
                      .next = "give floating point, and a weight of 0 or more"});
  const auto wide = tensor.element_size() < 4 ? torch::kFloat32 : tensor.scalar_type();
  const torch::Tensor total = torch::tensor({weight}, torch::kFloat64);
  const torch::Tensor weighted =
      weight > 0 ? tensor.to(wide) * weight : torch::zeros(tensor.sizes(), tensor.options().dtype(wide));
  all_reduce(total);
  if (total.item<double>() == 0)
    throw UsageError({.what = "weighted_mean with weights that are all 0", .here = describe()});
  all_reduce(weighted);
  tensor.copy_(weighted / total.item<double>());
}

// ---- Messages

void World::send(const torch::Tensor& tensor, int to, int tag) const {
  run(message_call(state_->caller, Operation::kSend, tensor, to, tag));
}

Work World::send_async(const torch::Tensor& tensor, int to, int tag) const {
  return start(message_call(state_->caller, Operation::kSend, tensor, to, tag));
}

int World::receive(const torch::Tensor& tensor, const ReceiveOptions& options) const {
  const TensorCall call = message_call(state_->caller, Operation::kReceive, tensor, options.from, options.tag);
  const int source = state_->run_message(call);
  call.finish();
  return source;
}

Work World::receive_async(const torch::Tensor& tensor, const ReceiveOptions& options) const {
  return start(message_call(state_->caller, Operation::kReceive, tensor, options.from, options.tag));
}

void require_device(const torch::Tensor& tensor, torch::Device device, const std::string& name) {
  const bool same_type = tensor.device().type() == device.type();
  if (same_type && (!device.has_index() || tensor.device().index() == device.index())) return;
  throw DeviceError({.what = concat(name, " is on ", tensor.device().str(), ", but ", device.str(), " is needed"),
                     .likely = "a tensor or a module that was not moved",
                     .next = "call .to(world.device()) on it first"});
}

}  // namespace lockstep
