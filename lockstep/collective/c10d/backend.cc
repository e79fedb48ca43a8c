// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend.h"

#include <algorithm>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "lockstep/base/to_size.h"
#include "lockstep/collective/c10d/backend_connect.h"
#include "lockstep/collective/c10d/backend_tensors.h"
#include "lockstep/collective/c10d/backend_work.h"
#include "lockstep/collective/call_queue.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/error.h"

namespace lockstep {

using namespace backend;
using c10d::OpType;
using Tensor = ShmBackend::Tensor;
using Tensors = ShmBackend::Tensors;
using WorkPtr = ShmBackend::WorkPtr;

namespace {

// What the calls on one tensor have in common: each rank gives or gets as many elements as `tensor` has.
Call call_on(Operation operation, const Tensor& tensor, const Unit& unit, const FlatTensors& input,
             const FlatTensors& output) {
  return {.operation = operation,
          .input = input.memory(),
          .output = output.memory(),
          .count = unit.count(tensor.numel()),
          .dtype = unit.dtype};
}

}  // namespace

// How a call is to be made, out of c10d's options for it.
struct ShmBackend::Manner {
  template <class Options>
  explicit Manner(const Options& options) : async(options.asyncOp) {
    if (options.timeout != c10d::kUnsetTimeout) timeout = options.timeout;
  }

  bool async;
  std::optional<std::chrono::milliseconds> timeout;
};

struct ShmBackend::Step {
  FlatTensors input;
  FlatTensors output;
  Call call;
};

// Members go in reverse order: first the queue, which uses the group; last the tensors that the group uses.
struct ShmBackend::Parts {
  explicit Parts(shm::Group connected) : group(std::move(connected)) {}

  void run(const std::vector<Step>& steps) {
    for (const Step& step : steps) {
      step.input.copy_in();
      group.run(step.call);
      step.output.copy_out();
    }
  }

  void leave() {
    queue.run_all();
    group.leave();
  }

  // The core reads or writes the memory until the message is done, also where a wait has ended at its timeout or the
  // Work was dropped: the tensors stay here until then. Those that are done go when the next message starts.
  FuturePtr start_message(const FlatTensors& piece, const Call& call) {
    const std::lock_guard lock(messages);
    std::erase_if(under_way, [](const Message& message) { return message.future->done(); });
    under_way.push_back({piece, group.start(call)});
    return under_way.back().future;
  }

  struct Message {
    FlatTensors piece;
    FuturePtr future;
  };

  std::list<Message> under_way;  // before the group, so that they outlive its threads
  shm::Group group;
  std::mutex messages;  // one thread at a time starts a send or receive; a collective may be under way meanwhile
  CallQueue queue;
};

ShmBackend::ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout)
    : Backend(rank, size), timeout_(timeout), parts_(std::make_unique<Parts>(connect(*store, rank, size, timeout))) {}

ShmBackend::~ShmBackend() {
  if (std::uncaught_exceptions() > 0) abort();
  try {
    shutdown();
  } catch (const std::exception&) {  // the peers notice, and no one is left here to be told
  }
}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  parts().queue.run([&] { parts().group.set_timeout(timeout); });
  timeout_ = timeout;
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) return nullptr;
  return c10::make_intrusive<ShmBackend>(store, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()),
                                         options ? options->timeout : timeout_);
}

void ShmBackend::shutdown() {
  if (parts_ == nullptr) return;
  if (parts_->queue.inside()) {
    // Out of a callback, which may hold the last reference to the backend: the callback itself has to end first.
    std::thread([parts = std::move(parts_)] { failure_of([&] { parts->leave(); }); }).detach();
    return;
  }
  parts_->leave();
  parts_.reset();
}

void ShmBackend::abort() {
  if (parts_ != nullptr) parts_->group.poison("abort() was called, or an exception left the process group");
}

ShmBackend::Parts& ShmBackend::parts() const {
  if (parts_ != nullptr) return *parts_;
  throw UsageError({.what = "a call on a lockstep backend after its shutdown",
                    .likely = "destroy_process_group() came first",
                    .next = "make the call before, or a new process group"});
}

Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  const auto bytes = to_size(size) * options.dtype().itemsize();
  auto memory = std::make_shared<shm::Memory>(parts().group.allocate(bytes));
  return at::from_blob(
      memory->data(), {size}, [memory](void*) mutable { memory.reset(); }, options);
}

WorkPtr ShmBackend::start(OpType type, std::vector<Step> steps, Tensors results, const Manner& manner) {
  ++issued_;
  auto work = c10::make_intrusive<CollectiveWork>(rank_, type, std::move(results));
  if (manner.timeout)
    for (Step& step : steps) step.call.timeout = *manner.timeout;
  auto task = [parts = &parts(), work, steps = std::move(steps)]() mutable {
    const std::exception_ptr error = failure_of([&] { parts->run(steps); });
    steps.clear();  // who has waited is the only one to hold the tensors
    work->complete(error);
  };
  if (manner.async) {
    parts().queue.add(std::move(task));
    parts().queue.hand_to_worker();
  } else {
    parts().queue.run(task);
  }
  return work;
}

// ---- Reductions

ShmBackend::Step ShmBackend::all_reduce_step(const Tensor& tensor, const c10d::ReduceOp& op) const {
  const FlatTensors output({tensor});
  const FlatTensors input = op.op_ == c10d::ReduceOp::PREMUL_SUM ? FlatTensors({scaled(tensor, op)}) : output;
  const Unit unit = unit_to_reduce(tensor, op);
  Call call = call_on(Operation::kAllReduce, tensor, unit, input, output);
  call.op = to_reduce_op(op);
  return {input, output, call};
}

WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Tensor& tensor = only_one(tensors, "all_reduce");
  return start(OpType::ALLREDUCE, {all_reduce_step(tensor, options.reduceOp)}, tensors, Manner(options));
}

WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Step> steps;
  for (const Tensor& tensor : tensors) steps.push_back(all_reduce_step(tensor, options.reduceOp));
  return start(OpType::ALLREDUCE_COALESCED, std::move(steps), tensors, Manner(options));
}

WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Tensor& tensor = only_one(tensors, "reduce");
  const FlatTensors input({scaled(tensor, options.reduceOp)});
  const FlatTensors output = options.rootRank == rank_ ? FlatTensors({tensor}) : FlatTensors();
  const Unit unit = unit_to_reduce(tensor, options.reduceOp);
  Call call = call_on(Operation::kReduce, tensor, unit, input, output);
  call.op = to_reduce_op(options.reduceOp);
  call.root = static_cast<int>(options.rootRank);
  return start(OpType::REDUCE, {{input, output, call}}, tensors, Manner(options));
}

ShmBackend::Step ShmBackend::reduce_scatter_step(const Tensor& part, const Tensors& whole,
                                                 const c10d::ReduceOp& op) const {
  const FlatTensors output({part});
  const FlatTensors input = input_beside(scaled(whole, op), output);
  const Unit unit = unit_to_reduce(part, op);
  Counts counts = counts_of(whole, size_, unit);
  check_part(part, input.first(), counts.of(rank_), unit);
  return {input, output,
          Call{.operation = Operation::kReduceScatter,
               .input = input.memory(),
               .output = output.memory(),
               .count = counts.even,
               .counts = std::move(counts.each),
               .dtype = unit.dtype,
               .op = to_reduce_op(op)}};
}

WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ReduceScatterOptions& options) {
  const Step step = reduce_scatter_step(only_one(outputs, "output"), only_one(inputs, "input"), options.reduceOp);
  return start(OpType::REDUCE_SCATTER, {step}, outputs, Manner(options));
}

WorkPtr ShmBackend::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  const Step step = reduce_scatter_step(output, {input}, options.reduceOp);
  return start(OpType::_REDUCE_SCATTER_BASE, {step}, {output}, Manner(options));
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  check_pairs(outputs, inputs);
  std::vector<Step> steps;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    steps.push_back(reduce_scatter_step(outputs[i], {inputs[i]}, options.reduceOp));
  return start(OpType::COALESCED, std::move(steps), outputs, Manner(options));
}

// ---- Moving data

WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const Tensor& tensor = only_one(tensors, "broadcast");
  const FlatTensors piece({tensor});
  const Unit unit = unit_to_move(tensor);
  Call call = call_on(Operation::kBroadcast, tensor, unit, /*input=*/FlatTensors(), piece);
  call.root = static_cast<int>(options.rootRank);
  return start(OpType::BROADCAST, {{piece, piece, call}}, tensors, Manner(options));
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return start(OpType::BARRIER, {{FlatTensors(), FlatTensors(), Call{}}}, {}, Manner(options));
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) { barrier(options)->wait(); }

ShmBackend::Step ShmBackend::all_gather_step(const Tensors& whole, const Tensor& part) const {
  const FlatTensors output(whole);
  const FlatTensors input = input_beside({part}, output);
  const Unit unit = unit_to_move(part);
  Counts counts = counts_of(whole, size_, unit);
  check_part(part, whole.front(), counts.of(rank_), unit);
  return {input, output,
          Call{.operation = Operation::kAllGather,
               .input = input.memory(),
               .output = output.memory(),
               .count = counts.even,
               .counts = std::move(counts.each),
               .dtype = unit.dtype}};
}

WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors& whole = only_one(outputs, "output");
  return start(OpType::ALLGATHER, {all_gather_step(whole, only_one(inputs, "input"))}, whole, Manner(options));
}

WorkPtr ShmBackend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  return start(OpType::_ALLGATHER_BASE, {all_gather_step({output}, input)}, {output}, Manner(options));
}

// outputs[r][i] is rank r's inputs[i].
WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  for (const Tensors& of_rank : outputs) check_pairs(of_rank, inputs);
  std::vector<Step> steps;
  Tensors results;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors whole;
    for (const Tensors& of_rank : outputs) whole.push_back(of_rank[i]);
    steps.push_back(all_gather_step(whole, inputs[i]));
    results.insert(results.end(), whole.begin(), whole.end());
  }
  return start(OpType::ALLGATHER_COALESCED, std::move(steps), std::move(results), Manner(options));
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs);
  std::vector<Step> steps;
  for (std::size_t i = 0; i < outputs.size(); ++i) steps.push_back(all_gather_step({outputs[i]}, inputs[i]));
  return start(OpType::COALESCED, std::move(steps), outputs, Manner(options));
}

WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const Tensor& part = only_one(inputs, "input");
  const bool is_root = options.rootRank == rank_;
  const Tensors whole = is_root ? only_one(outputs, "output") : Tensors();
  const FlatTensors output(whole);
  const FlatTensors input = input_beside({part}, output);
  const Unit unit = unit_to_move(part);
  if (is_root) check_equal_parts(whole, part, size_);
  Call call = call_on(Operation::kGather, part, unit, input, output);
  call.root = static_cast<int>(options.rootRank);
  return start(OpType::GATHER, {{input, output, call}}, whole, Manner(options));
}

WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const Tensor& part = only_one(outputs, "output");
  const bool is_root = options.rootRank == rank_;
  const Tensors whole = is_root ? only_one(inputs, "input") : Tensors();
  const FlatTensors output({part});
  const FlatTensors input = input_beside(whole, output);
  const Unit unit = unit_to_move(part);
  if (is_root) check_equal_parts(whole, part, size_);
  Call call = call_on(Operation::kScatter, part, unit, input, output);
  call.root = static_cast<int>(options.rootRank);
  return start(OpType::SCATTER, {{input, output, call}}, outputs, Manner(options));
}

WorkPtr ShmBackend::alltoall_base(Tensor& output_tensor, Tensor& input_tensor, std::vector<std::int64_t>& output_splits,
                                  std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  const FlatTensors output({output_tensor});
  const FlatTensors input = input_beside({input_tensor}, output);
  check_same_dtype(input_tensor, output_tensor);
  const Call call{.operation = Operation::kAllToAll,
                  .input = input.memory(),
                  .output = output.memory(),
                  .counts = counts_of_rows(input_tensor, input_splits, size_, "the input"),
                  .receive_counts = counts_of_rows(output_tensor, output_splits, size_, "the output"),
                  .dtype = unit_to_move(output_tensor).dtype};
  return start(OpType::ALLTOALL_BASE, {{input, output, call}}, {output_tensor}, Manner(options));
}

WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const FlatTensors output(outputs);
  const FlatTensors input = input_beside(inputs, output);
  const Call call{.operation = Operation::kAllToAll,
                  .input = input.memory(),
                  .output = output.memory(),
                  .counts = counts_of_tensors(inputs, size_),
                  .receive_counts = counts_of_tensors(outputs, size_),
                  .dtype = unit_to_move(output.first()).dtype};
  check_same_dtype(input.first(), output.first());
  return start(OpType::ALLTOALL, {{input, output, call}}, outputs, Manner(options));
}

// ---- Messages

WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  const Tensor& tensor = only_one(tensors, "send");
  const FlatTensors piece({tensor});
  Call call = call_on(Operation::kSend, tensor, unit_to_move(tensor), piece, /*output=*/FlatTensors());
  call.peer = to;
  call.tag = tag;
  piece.copy_in();
  return c10::make_intrusive<MessageWork>(rank_, OpType::SEND, piece, parts().start_message(piece, call));
}

WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) { return receive(tensors, from, tag, OpType::RECV); }

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, kAnyRank, tag, OpType::RECVANYSOURCE);
}

WorkPtr ShmBackend::receive(Tensors& tensors, int from, int tag, OpType type) {
  const Tensor& tensor = only_one(tensors, "receive");
  const FlatTensors piece({tensor});
  Call call = call_on(Operation::kReceive, tensor, unit_to_move(tensor), /*input=*/FlatTensors(), piece);
  call.peer = from;
  call.tag = tag;
  return c10::make_intrusive<MessageWork>(rank_, type, piece, parts().start_message(piece, call));
}

}  // namespace lockstep
