#include "lockstep/collective/plan.h"

#include <numeric>

#include <ATen/MemoryOverlap.h>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm_dtype.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Sizes = std::vector<std::int64_t>;

[[noreturn]] void refuse(const WorldState& world, const std::string& what, const std::string& next) {
  throw UsageError({.what = what, .here = world.describe(), .next = next});
}

// ---- Arguments

// Also in a world of one: what would fail on many ranks fails on one.
void check_tensor(const WorldState& world, const torch::Tensor& tensor, const char* operation) {
  if (!tensor.defined()) refuse(world, concat(operation, " was given an undefined tensor"), "give it a tensor");
  if (!tensor.is_cpu()) require_device(tensor, world.device, concat("the tensor given to ", operation));
  if (tensor.layout() != torch::kStrided)
    refuse(world, concat(operation, " of a tensor of layout ", c10::str(tensor.layout())),
           "call to_dense() on it first");
  if (!to_shm_dtype(tensor.scalar_type()))
    refuse(world, concat(operation, ": tensors of ", c10::toString(tensor.scalar_type()), " can't be exchanged"),
           "exchange real and imaginary parts, or another dtype");
}

void check_op(const WorldState& world, const torch::Tensor& tensor, ReduceOp op) {
  const bool mean_of_integers = op == ReduceOp::kMean && !tensor.is_floating_point();
  if (!mean_of_integers && shm::defined(*to_shm_dtype(tensor.scalar_type()), op)) return;
  refuse(world, concat(shm::to_string(op), " is not defined for ", c10::toString(tensor.scalar_type())),
         "convert the tensor, or choose another op");
}

void check_rank(const WorldState& world, const char* what, int rank) {
  if (rank < 0 || rank >= world.size())
    refuse(world, concat(what, " ", rank, " of ", world.size(), " ranks"), "name a rank of this world");
}

void check_message(const WorldState& world, const char* what, int peer, int tag) {
  if (peer != kAnyRank) check_rank(world, what, peer);
  if (peer == world.rank() || world.size() == 1)
    refuse(world, "a message of a rank to itself", "name another rank of this world");
  if (tag < 0) refuse(world, concat("a message with tag ", tag), "use tags from 0 up");
}

void check_written(const WorldState& world, const torch::Tensor& tensor, const char* operation) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    refuse(world,
           concat(operation, " into a tensor whose elements share memory: shape ", tensor.sizes(), ", strides ",
                  tensor.strides()),
           "give it a tensor that was not expanded");
}

void check_first_dimension(const WorldState& world, const torch::Tensor& tensor, const char* operation) {
  if (tensor.dim() == 0)
    refuse(world, concat(operation, " of a tensor without dimensions"), "give it rows: unsqueeze(0)");
}

void check_rows(const WorldState& world, const Sizes& rows, const char* what) {
  const bool negative = std::ranges::any_of(rows, [](std::int64_t count) { return count < 0; });
  if (rows.size() != static_cast<std::size_t>(world.size()) || negative)
    refuse(world, concat(what, ": ", rows.size(), " counts for ", world.size(), " ranks, or a negative one"),
           "give one count per rank");
}

std::int64_t sum_of(const Sizes& rows) { return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}); }

void check_sum(const WorldState& world, const Sizes& rows, const torch::Tensor& tensor, const char* what) {
  check_rows(world, rows, what);
  if (sum_of(rows) != tensor.size(0))
    refuse(world, concat(what, ": counts of ", sum_of(rows), " rows together for a tensor of ", tensor.size(0)),
           "give counts that add up to the first dimension");
}

void check_divisible(const WorldState& world, const torch::Tensor& tensor, const char* operation) {
  if (tensor.size(0) % world.size() != 0)
    refuse(world, concat(operation, " of ", tensor.size(0), " rows over ", world.size(), " ranks"),
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

Sizes with_ranks(const WorldState& world, const torch::Tensor& tensor) {
  Sizes shape = tensor.sizes().vec();
  shape.insert(shape.begin(), world.size());
  return shape;
}

std::int64_t row_elements(const torch::Tensor& tensor) { return c10::multiply_integers(tensor.sizes().slice(1)); }

Sizes counts_of(const Sizes& rows, const torch::Tensor& tensor) {
  Sizes counts = rows;
  for (std::int64_t& count : counts) count *= row_elements(tensor);
  return counts;
}

// ---- Plans

Plan plan_of(Operation operation, const torch::Tensor& input) {
  Plan plan;
  plan.call.operation = operation;
  plan.call.input = input.defined() ? without_gaps(input) : input;
  return plan;
}

// The result goes into `tensor`, which holds the input too where `reads` is true.
void write_to(Plan& plan, const WorldState& world, const torch::Tensor& tensor, bool reads) {
  check_written(world, tensor, shm::to_string(plan.call.operation).c_str());
  plan.result = tensor;
  plan.call.output = tensor;
  if (!has_gaps(tensor)) return;
  plan.staged = reads ? without_gaps(tensor) : torch::empty(tensor.sizes(), tensor.options().requires_grad(false));
  plan.call.output = plan.staged;
}

Plan in_place(Operation operation, const WorldState& world, const torch::Tensor& tensor) {
  Plan plan;
  plan.call.operation = operation;
  write_to(plan, world, tensor, true);
  plan.call.input = plan.call.output;
  return plan;
}

// The result goes into `given`, or into a new tensor.
void write_result(Plan& plan, const WorldState& world, const torch::Tensor& given, const Sizes& shape) {
  const torch::Tensor& like = plan.call.input;
  if (given.defined()) {
    const bool fits = given.sizes() == torch::IntArrayRef(shape) && given.scalar_type() == like.scalar_type() &&
                      given.device() == like.device();
    if (!fits)
      refuse(world,
             concat("an output of shape ", given.sizes(), " ", c10::toString(given.scalar_type()), ", but ",
                    torch::IntArrayRef(shape), " ", c10::toString(like.scalar_type()), " is the result"),
             "give it that shape and dtype, or none");
    write_to(plan, world, given, false);
    if (overlap(plan.call.input, plan.call.output)) plan.call.input = plan.call.input.detach().clone();
    return;
  }
  plan.result = torch::empty(shape, like.options().requires_grad(false));
  plan.call.output = plan.result;
}

}  // namespace

void Plan::finish() const {
  if (!staged.defined()) return;
  const torch::NoGradGuard no_grad;
  result.copy_(staged);
}

Plan plan_all_reduce(const WorldState& world, const torch::Tensor& tensor, const AllReduceOptions& options) {
  check_tensor(world, tensor, "all_reduce");
  check_op(world, tensor, options.op);
  Plan plan = in_place(Operation::kAllReduce, world, tensor);
  plan.call.op = options.op;
  plan.call.algorithm = options.algorithm;
  return plan;
}

Plan plan_reduce(const WorldState& world, const torch::Tensor& tensor, const ReduceOptions& options) {
  check_tensor(world, tensor, "reduce");
  check_op(world, tensor, options.op);
  check_rank(world, "root", options.root);
  const bool at_root = options.root == world.rank();
  Plan plan = at_root ? in_place(Operation::kReduce, world, tensor) : plan_of(Operation::kReduce, tensor);
  plan.call.op = options.op;
  plan.call.root = options.root;
  return plan;
}

Plan plan_reduce_scatter(const WorldState& world, const torch::Tensor& tensor, const ReduceScatterOptions& options) {
  check_tensor(world, tensor, "reduce_scatter");
  check_op(world, tensor, options.op);
  check_first_dimension(world, tensor, "reduce_scatter");
  const bool even = options.rows.empty();
  if (even)
    check_divisible(world, tensor, "reduce_scatter");
  else
    check_sum(world, options.rows, tensor, "reduce_scatter");
  Plan plan = plan_of(Operation::kReduceScatter, tensor);
  plan.call.op = options.op;
  plan.call.counts = counts_of(options.rows, tensor);
  const std::int64_t mine = even ? tensor.size(0) / world.size() : options.rows[static_cast<std::size_t>(world.rank())];
  write_result(plan, world, options.output, with_rows(mine, tensor));
  return plan;
}

Plan plan_all_gather(const WorldState& world, const torch::Tensor& tensor, const AllGatherOptions& options) {
  check_tensor(world, tensor, "all_gather");
  Plan plan = plan_of(Operation::kAllGather, tensor);
  write_result(plan, world, options.output, with_ranks(world, tensor));
  return plan;
}

Plan plan_all_gather_rows(const WorldState& world, const torch::Tensor& tensor, const AllGatherRowsOptions& options) {
  check_tensor(world, tensor, "all_gather_rows");
  check_first_dimension(world, tensor, "all_gather_rows");
  check_rows(world, options.rows, "all_gather_rows");
  const std::int64_t mine = options.rows[static_cast<std::size_t>(world.rank())];
  if (mine != tensor.size(0))
    refuse(world, concat("all_gather_rows of ", tensor.size(0), " rows, but ", mine, " are announced for this rank"),
           "give the same counts on all ranks, or none");
  Plan plan = plan_of(Operation::kAllGather, tensor);
  plan.call.counts = counts_of(options.rows, tensor);
  write_result(plan, world, options.output, with_rows(sum_of(options.rows), tensor));
  return plan;
}

Plan plan_broadcast(const WorldState& world, const torch::Tensor& tensor, int root) {
  check_tensor(world, tensor, "broadcast");
  check_rank(world, "root", root);
  Plan plan = in_place(Operation::kBroadcast, world, tensor);
  if (root == world.rank()) plan.staged.reset();  // it has what it sends
  plan.call.root = root;
  return plan;
}

Plan plan_gather(const WorldState& world, const torch::Tensor& tensor, int root) {
  check_tensor(world, tensor, "gather");
  check_rank(world, "root", root);
  Plan plan = plan_of(Operation::kGather, tensor);
  plan.call.root = root;
  if (root == world.rank()) write_result(plan, world, {}, with_ranks(world, tensor));
  return plan;
}

Plan plan_scatter(const WorldState& world, const torch::Tensor& parts, const torch::Tensor& output, int root) {
  check_tensor(world, output, "scatter");
  check_rank(world, "root", root);
  const bool at_root = root == world.rank();
  if (at_root) check_tensor(world, parts, "scatter");
  if (at_root && (parts.sizes() != torch::IntArrayRef(with_ranks(world, output)) || parts.dtype() != output.dtype()))
    refuse(world,
           concat("scatter of parts of shape ", parts.sizes(), " ", c10::toString(parts.scalar_type()), " into ",
                  output.sizes(), " ", c10::toString(output.scalar_type())),
           "give parts of one dtype and shape (number of ranks, ...)");
  Plan plan = plan_of(Operation::kScatter, at_root ? parts : torch::Tensor());
  plan.call.root = root;
  write_to(plan, world, output, false);
  if (at_root && overlap(plan.call.input, plan.call.output)) plan.call.input = plan.call.input.detach().clone();
  return plan;
}

Plan plan_all_to_all(const WorldState& world, const torch::Tensor& tensor, const AllToAllOptions& options) {
  check_tensor(world, tensor, "all_to_all");
  check_first_dimension(world, tensor, "all_to_all");
  const bool even = options.send_rows.empty();
  if (even != options.receive_rows.empty())
    refuse(world, "all_to_all with one list of counts", "give send_rows and receive_rows, or neither");
  if (even)
    check_divisible(world, tensor, "all_to_all");
  else
    check_sum(world, options.send_rows, tensor, "all_to_all");
  if (!even) check_rows(world, options.receive_rows, "all_to_all");
  Plan plan = plan_of(Operation::kAllToAll, tensor);
  plan.call.counts = counts_of(options.send_rows, tensor);
  plan.call.receive_counts = counts_of(options.receive_rows, tensor);
  write_result(plan, world, options.output, with_rows(even ? tensor.size(0) : sum_of(options.receive_rows), tensor));
  return plan;
}

Plan plan_send(const WorldState& world, const torch::Tensor& tensor, int to, int tag) {
  check_tensor(world, tensor, "send");
  check_rank(world, "to", to);
  check_message(world, "to", to, tag);
  return plan_of(Operation::kSend, tensor);
}

Plan plan_receive(const WorldState& world, const torch::Tensor& tensor, const ReceiveOptions& options) {
  check_tensor(world, tensor, "receive");
  check_message(world, "from", options.from, options.tag);
  Plan plan;
  plan.call.operation = Operation::kReceive;
  write_to(plan, world, tensor, false);
  return plan;
}

}  // namespace lockstep
