// SPDX-License-Identifier: Apache-2.0
// World's collectives and messages: each checks what only torch knows of this rank's arguments, and makes a TensorCall.
// The transports check the rest (check_call).
#include <limits>
#include <numeric>

#include <ATen/MemoryOverlap.h>

#include "lockstep/base/text.h"
#include "lockstep/collective/world/world_state.h"

namespace lockstep {
namespace {

using torch::Tensor;

using Sizes = std::vector<int64_t>;

int64_t sum_of(const Sizes& rows) { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }

Sizes with_rows(int64_t rows, const Tensor& tensor) {
  Sizes shape = tensor.sizes().vec();
  shape.front() = rows;
  return shape;
}

// A call of this rank on `tensor`, before it is made: its checks, and the tensor of its result.
class Asked {
 public:
  // Checks the tensor. Also in a world of one: what would fail on many ranks fails on one.
  Asked(const WorldState& world, const char* name, const Tensor& tensor) : world_(world), name_(name), tensor_(tensor) {
    check_tensor(tensor);
  }

  [[noreturn]] void refuse(const std::string& what, const std::string& next) const {
    throw UsageError({.what = what, .here = world_.here, .next = next});
  }

  void check_tensor(const Tensor& tensor) const {
    if (!tensor.defined()) refuse(concat(name_, " was given an undefined tensor"), "give it a tensor");
    if (!tensor.is_cpu()) require_device(tensor, world_.device, concat("the tensor given to ", name_));
    if (tensor.layout() != torch::kStrided)
      refuse(concat(name_, " of a tensor of layout ", c10::str(tensor.layout())), "call to_dense() on it first");
    if (!to_dtype(tensor.scalar_type()))
      refuse(concat(name_, ": tensors of ", c10::toString(tensor.scalar_type()), " can't be exchanged"),
             "exchange real and imaginary parts, or another dtype");
  }

  // Refuses a mean of integers: for floating point alone all mean the same by it.
  void check_op(ReduceOp op) const {
    if (op == ReduceOp::kMean && !tensor_.is_floating_point())
      refuse(concat("mean is not defined for ", c10::toString(tensor_.scalar_type())),
             "convert the tensor, or choose another op");
  }

  void check_has_rows() const {
    if (tensor_.dim() == 0) refuse(concat(name_, " of a tensor without dimensions"), "give it rows: unsqueeze(0)");
  }

  // Before their sum is the size of a tensor.
  void check_rows(const Sizes& rows) const {
    const int64_t most = std::numeric_limits<int64_t>::max() / world_.size();
    if (std::cmp_not_equal(rows.size(), world_.size()) || std::ranges::min(rows) < 0 || std::ranges::max(rows) > most)
      refuse(concat(name_, ": rows of [", join(rows, ", "), "] for ", world_.size(), " ranks"),
             "give one count from 0 up for each rank, or none");
  }

  // The elements of each rank's part of `whole`, which is cut into `rows`; none: equal parts.
  std::vector<size_t> counts_of(const Tensor& whole, const Sizes& rows) const {
    check_has_rows();
    std::vector<size_t> counts = counts_of_rows(whole, rows, world_.size(), name_);
    if (rows.empty()) counts.clear();
    return counts;
  }

  Sizes with_ranks() const {
    Sizes shape = tensor_.sizes().vec();
    shape.insert(shape.begin(), world_.size());
    return shape;
  }

  // The tensor for a result that is like the call's, but for its shape: `given`, or a new one.
  Tensor output_for(const Tensor& given, const Sizes& shape) const {
    if (!given.defined()) return torch::empty(shape, tensor_.options().requires_grad(false));
    const bool fits = given.sizes() == torch::IntArrayRef(shape) && given.scalar_type() == tensor_.scalar_type() &&
                      given.device() == tensor_.device();
    if (!fits)
      refuse(concat("an output of shape ", given.sizes(), " ", c10::toString(given.scalar_type()), ", but ",
                    torch::IntArrayRef(shape), " ", c10::toString(tensor_.scalar_type()), " is the result"),
             "give it that shape and dtype, or none");
    return given;
  }

  // `call` on these; an undefined one: this rank gives, or gets, nothing.
  TensorCall on(const Tensor& input, const Tensor& output, Call call) const {
    const auto list_of = [](const Tensor& tensor) { return at::TensorList(&tensor, tensor.defined() ? 1 : 0); };
    if (output.defined() && at::has_internal_overlap(output) == at::MemOverlap::Yes)
      refuse(concat(to_string(call.operation), " into a tensor whose elements share memory: shape ", output.sizes(),
                    ", strides ", output.strides()),
             "give it a tensor that was not expanded");
    call.dtype = *to_dtype(tensor_.scalar_type());
    return with_memory(std::move(call), list_of(input), list_of(output));
  }

  size_t count() const { return to_size(tensor_.numel()); }

 private:
  const WorldState& world_;
  const char* name_;
  const Tensor& tensor_;
};

TensorCall all_reduce_call(const WorldState& world, const Tensor& tensor, const AllReduceOptions& options) {
  const Asked asked(world, "all_reduce", tensor);
  asked.check_op(options.op);
  return asked.on(
      tensor, tensor,
      {.operation = Operation::kAllReduce, .count = asked.count(), .op = options.op, .algorithm = options.algorithm});
}

TensorCall reduce_scatter_call(const WorldState& world, const Tensor& tensor, const ReduceScatterOptions& options) {
  const Asked asked(world, "reduce_scatter", tensor);
  asked.check_op(options.op);
  std::vector<size_t> counts = asked.counts_of(tensor, options.rows);
  const int64_t mine = options.rows.empty() ? tensor.size(0) / world.size() : options.rows[to_size(world.rank())];
  const Tensor output = asked.output_for(options.output, with_rows(mine, tensor));
  return asked.on(tensor, output,
                  {.operation = Operation::kReduceScatter,
                   .count = to_size(output.numel()),
                   .counts = std::move(counts),
                   .op = options.op});
}

TensorCall all_gather_call(const WorldState& world, const Tensor& tensor, const AllGatherOptions& options) {
  const Asked asked(world, "all_gather", tensor);
  return asked.on(tensor, asked.output_for(options.output, asked.with_ranks()),
                  {.operation = Operation::kAllGather, .count = asked.count()});
}

TensorCall broadcast_call(const WorldState& world, const Tensor& tensor, int root) {
  const Asked asked(world, "broadcast", tensor);
  return asked.on(tensor, tensor, {.operation = Operation::kBroadcast, .count = asked.count(), .root = root});
}

TensorCall all_to_all_call(const WorldState& world, const Tensor& tensor, const AllToAllOptions& options) {
  const Asked asked(world, "all_to_all", tensor);
  std::vector<size_t> counts = asked.counts_of(tensor, options.send_rows);
  if (!counts.empty() || !options.receive_rows.empty()) asked.check_rows(options.receive_rows);
  const int64_t rows = counts.empty() ? tensor.size(0) : sum_of(options.receive_rows);
  const Tensor output = asked.output_for(options.output, with_rows(rows, tensor));
  return asked.on(tensor, output,
                  {.operation = Operation::kAllToAll,
                   .count = asked.count() / to_size(world.size()),
                   .counts = std::move(counts),
                   .receive_counts = asked.counts_of(output, options.receive_rows)});
}

TensorCall message_call(const WorldState& world, Operation operation, const Tensor& tensor, int peer, int tag) {
  const bool sends = operation == Operation::kSend;
  const Asked asked(world, sends ? "send" : "receive", tensor);
  if (peer == world.rank() || world.size() == 1)
    asked.refuse("a message of a rank to itself", "name another rank of this world");
  if (tag < 0) asked.refuse(concat("a message with tag ", tag), "use tags from 0 up");
  const Tensor none;
  return asked.on(sends ? tensor : none, sends ? none : tensor,
                  {.operation = operation, .count = asked.count(), .peer = peer, .tag = tag});
}

}  // namespace

Tensor World::run(const TensorCall& call) const {
  state_->run(call);
  return call.result;
}

void World::all_reduce(const Tensor& tensor, const AllReduceOptions& options) const {
  state_->run(all_reduce_call(*state_, tensor, options));
}
Work World::all_reduce_async(const Tensor& tensor, const AllReduceOptions& options) const {
  return start(all_reduce_call(*state_, tensor, options));
}

void World::reduce(const Tensor& tensor, const ReduceOptions& options) const {
  const Asked asked(*state_, "reduce", tensor);
  asked.check_op(options.op);
  state_->run(
      asked.on(tensor, options.root == rank() ? tensor : Tensor(),
               {.operation = Operation::kReduce, .count = asked.count(), .op = options.op, .root = options.root}));
}

Tensor World::reduce_scatter(const Tensor& tensor, const ReduceScatterOptions& options) const {
  return run(reduce_scatter_call(*state_, tensor, options));
}
Work World::reduce_scatter_async(const Tensor& tensor, const ReduceScatterOptions& options) const {
  return start(reduce_scatter_call(*state_, tensor, options));
}

Tensor World::all_gather(const Tensor& tensor, const AllGatherOptions& options) const {
  return run(all_gather_call(*state_, tensor, options));
}
Work World::all_gather_async(const Tensor& tensor, const AllGatherOptions& options) const {
  return start(all_gather_call(*state_, tensor, options));
}

void World::broadcast(const Tensor& tensor, int root) const { state_->run(broadcast_call(*state_, tensor, root)); }
Work World::broadcast_async(const Tensor& tensor, int root) const {
  return start(broadcast_call(*state_, tensor, root));
}

Tensor World::gather(const Tensor& tensor, int root) const {
  const Asked asked(*state_, "gather", tensor);
  return run(asked.on(tensor, root == rank() ? asked.output_for({}, asked.with_ranks()) : Tensor(),
                      {.operation = Operation::kGather, .count = asked.count(), .root = root}));
}

void World::scatter(const Tensor& parts, const Tensor& output, int root) const {
  const Asked asked(*state_, "scatter", output);
  const bool at_root = root == rank();
  if (at_root) asked.check_tensor(parts);
  if (at_root && (parts.sizes() != torch::IntArrayRef(asked.with_ranks()) || parts.dtype() != output.dtype()))
    asked.refuse(concat("scatter of parts of shape ", parts.sizes(), " ", c10::toString(parts.scalar_type()), " into ",
                        output.sizes(), " ", c10::toString(output.scalar_type())),
                 "give parts of one dtype and shape (number of ranks, ...)");
  state_->run(asked.on(at_root ? parts : Tensor(), output,
                       {.operation = Operation::kScatter, .count = asked.count(), .root = root}));
}

void World::barrier() const { state_->run({{.operation = Operation::kBarrier}}); }

Tensor World::all_gather_rows(const Tensor& tensor, const AllGatherRowsOptions& options) const {
  const Asked asked(*state_, "all_gather_rows", tensor);
  asked.check_has_rows();
  const Sizes rows =
      options.rows.empty() ? numbers_in<int64_t>(all_gather(torch::tensor({tensor.size(0)}))) : options.rows;
  asked.check_rows(rows);
  if (rows[to_size(rank())] != tensor.size(0))
    asked.refuse(
        concat("all_gather_rows of ", tensor.size(0), " rows here, where ", join(rows, ", "), " are announced"),
        "give the same counts on all ranks, or none");
  const Tensor output = asked.output_for(options.output, with_rows(sum_of(rows), tensor));
  return run(
      asked.on(tensor, output,
               {.operation = Operation::kAllGather, .count = asked.count(), .counts = asked.counts_of(output, rows)}));
}

Tensor World::all_to_all(const Tensor& tensor, const AllToAllOptions& options) const {
  AllToAllOptions known = options;
  if (known.receive_rows.empty() && !known.send_rows.empty())
    known.receive_rows = numbers_in<int64_t>(all_to_all(torch::tensor(known.send_rows)));
  return run(all_to_all_call(*state_, tensor, known));
}

Work World::all_to_all_async(const Tensor& tensor, const AllToAllOptions& options) const {
  return start(all_to_all_call(*state_, tensor, options));
}

// ---- Messages

void World::send(const Tensor& tensor, int to, int tag) const {
  state_->run(message_call(*state_, Operation::kSend, tensor, to, tag));
}

Work World::send_async(const Tensor& tensor, int to, int tag) const {
  return start(message_call(*state_, Operation::kSend, tensor, to, tag));
}

int World::receive(const Tensor& tensor, const ReceiveOptions& options) const {
  return state_->run(message_call(*state_, Operation::kReceive, tensor, options.from, options.tag));
}

Work World::receive_async(const Tensor& tensor, const ReceiveOptions& options) const {
  return start(message_call(*state_, Operation::kReceive, tensor, options.from, options.tag));
}

void require_device(const Tensor& tensor, torch::Device device, const std::string& name) {
  const bool same_type = tensor.device().type() == device.type();
  if (same_type && (!device.has_index() || tensor.device().index() == device.index())) return;
  throw DeviceError({.what = concat(name, " is on ", tensor.device().str(), ", but ", device.str(), " is needed"),
                     .likely = "a tensor or a module that was not moved",
                     .next = "call .to(world.device()) on it first"});
}

}  // namespace lockstep
